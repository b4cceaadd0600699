#include "io/json.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <unordered_set>
#include <vector>

#include "core/check.h"

namespace tandem {

namespace {

constexpr size_t kMaxDepth = 64;
constexpr size_t kMaxShown = 100;
constexpr int64_t kMaxComparisons = 20'000'000;  // about 0.1 s

// Cuts at the boundary of a UTF-8 character.
std::string cut(std::string text) {
  if (text.size() <= kMaxShown) return text;
  size_t end = kMaxShown;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
  return text.substr(0, end) + "..";
}

// Refuses what nlohmann's parser accepts: duplicate keys and any depth. It is a separate pass
// because the parser's callback makes arrays of objects take quadratic time: it searches the array
// at the end of each of its objects.
class Strict : public nlohmann::json::json_sax_t {
 public:
  explicit Strict(std::string_view source) : source_(source) {}

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(size_t) override { return open(); }
  bool start_array(size_t) override { return open(); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(string_t& key) override {
    std::unordered_set<std::string>& known = keys_.back();
    n_comparisons_ += static_cast<int64_t>(known.size());
    if (!known.insert(key).second)
      fail("{}: the key {} appears twice: remove one", source_, shown(key));
    return true;
  }
  bool parse_error(size_t, const std::string&, const nlohmann::json::exception& error) override {
    fail("{}: broken JSON: {}", source_, json_message(error));
  }

  // Number of key comparisons that building an ordered_json would take.
  int64_t n_comparisons() const { return n_comparisons_; }

 private:
  bool open() {
    require(keys_.size() < kMaxDepth, "{}: nested deeper than {} levels", source_, kMaxDepth);
    keys_.emplace_back();
    return true;
  }
  bool close() {
    keys_.pop_back();
    return true;
  }

  std::string_view source_;
  std::vector<std::unordered_set<std::string>> keys_;  // of each open object or array
  int64_t n_comparisons_ = 0;
};

// Throws Error unless `text` is strict JSON. Returns Strict::n_comparisons().
int64_t check_strict(std::string_view text, std::string_view source) {
  Strict strict(source);
  nlohmann::json::sax_parse(text, &strict);
  return strict.n_comparisons();
}

// The parser takes a zero byte for the end of the text and ignores the rest.
void require_no_zero_byte(std::string_view text, std::string_view source) {
  require(text.find('\0') == text.npos, "{}: broken JSON: byte {} is zero", source,
          text.find('\0'));
}

}  // namespace

std::string read_text_file(const std::string& path, int64_t max_bytes) {
  std::ifstream file(path, std::ios::binary);
  require(file.good(), "cannot open {}: {}", path, std::strerror(errno));
  std::string text;
  std::vector<char> piece(1 << 16);
  while (file.read(piece.data(), static_cast<std::streamsize>(piece.size())), file.gcount() > 0) {
    text.append(piece.data(), file.gcount());
    require(static_cast<int64_t>(text.size()) <= max_bytes,
            "{} is longer than {} bytes: too long for such a file", path, max_bytes);
  }
  require(!file.bad() && file.eof(), "cannot read {}: {}", path, std::strerror(errno));
  return text;
}

void require_folder(const std::string& path) {
  namespace fs = std::filesystem;
  constexpr std::string_view kWanted = "name the folder of a checkpoint";
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  require(status.type() != fs::file_type::not_found, "{} does not exist: {}", path, kWanted);
  require(!error, "{} cannot be read ({}): {}", path, error.message(), kWanted);
  require(fs::is_directory(status), "{} is not a folder: {}", path, kWanted);
  const fs::directory_iterator entries(path, error);
  require(!error, "{} cannot be read ({}): {}", path, error.message(), kWanted);
  require(entries != fs::directory_iterator(), "{} is empty: {}", path, kWanted);
}

nlohmann::json parse_json(std::string_view text, std::string_view source) {
  require_no_zero_byte(text, source);
  check_strict(text, source);
  return nlohmann::json::parse(text);
}

nlohmann::ordered_json parse_ordered_json(std::string_view text, std::string_view source) {
  require_no_zero_byte(text, source);
  require(check_strict(text, source) <= kMaxComparisons,
          "{}: its objects have too many keys: one may have about {}", source, 6000);
  return nlohmann::ordered_json::parse(text);
}

void scan_json(std::string_view text, std::string_view source,
               nlohmann::json::json_sax_t& handler) {
  require_no_zero_byte(text, source);
  nlohmann::json::sax_parse(text, &handler);
}

std::string json_message(const nlohmann::json::exception& error) {
  std::string_view what = error.what();
  if (const size_t end = what.find("] "); end != what.npos) what.remove_prefix(end + 2);
  std::string line(what);
  std::replace_if(
      line.begin(), line.end(), [](unsigned char c) { return c < 0x20; }, ' ');
  return cut(std::move(line));
}

std::string shown(std::string_view text) {
  return shown(nlohmann::json(text.substr(0, kMaxShown + 4)));
}

std::string shown(const nlohmann::json& value) {
  return cut(value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
}

std::string shown(const nlohmann::ordered_json& value) {
  return cut(value.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
}

bool needs_json_escape(char32_t c) { return c < 0x20 || c == '"' || c == '\\'; }

std::string json_escape(char32_t c) {
  switch (c) {
    case '"':
    case '\\':
      return {'\\', static_cast<char>(c)};
    case '\b':
      return "\\b";
    case '\f':
      return "\\f";
    case '\n':
      return "\\n";
    case '\r':
      return "\\r";
    case '\t':
      return "\\t";
    default:
      return fmt::format("\\u{:04x}", static_cast<uint32_t>(c));
  }
}

std::string percent_decoded(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    unsigned value = 0;
    const char* digits = text.data() + i + 1;
    const bool escaped = text[i] == '%' && i + 2 < text.size() &&
                         std::from_chars(digits, digits + 2, value, 16).ptr == digits + 2;
    out += escaped ? static_cast<char>(value) : text[i];
    if (escaped) i += 2;
  }
  return out;
}

}  // namespace tandem
