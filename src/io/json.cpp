#include "io/json.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <unordered_set>
#include <vector>

#include "core/check.h"

namespace tandem {
namespace {

constexpr int kMaxDepth = 64;
constexpr size_t kMaxShown = 100;
constexpr int64_t kMostComparisons = 20'000'000;  // about 0.1 s

// Cuts before a UTF-8 character that would not fit whole.
std::string cut(std::string text) {
  if (text.size() <= kMaxShown) return text;
  size_t end = kMaxShown;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
  return text.substr(0, end) + "..";
}

// Called by the parser at every key, start and end; nlohmann's own parser takes the last of two
// equal keys and any depth.
class Strict {
 public:
  explicit Strict(std::string_view source) : source_(source) {}

  template <class AnyJson>
  bool operator()(int depth, typename AnyJson::parse_event_t event, const AnyJson& value) {
    using Event = typename AnyJson::parse_event_t;
    if (event == Event::object_start || event == Event::array_start)
      require(depth < kMaxDepth,
              "{}: nested deeper than {} levels: this is no file of a checkpoint", source_,
              kMaxDepth);
    if (event == Event::object_start) {
      keys_.resize(depth + 1);
      keys_[depth].clear();
    } else if (event == Event::key) {
      const auto& key = value.template get_ref<const std::string&>();
      n_comparisons_ += static_cast<int64_t>(keys_[depth - 1].size());
      if (!keys_[depth - 1].insert(key).second)
        fail("{}: the key {} stands twice: remove one", source_, shown(key));
    }
    return true;
  }

  // That an object which searches its keys one by one has made so far.
  int64_t n_comparisons() const { return n_comparisons_; }

 private:
  std::string_view source_;
  std::vector<std::unordered_set<std::string>> keys_;  // [depth of the open object]
  int64_t n_comparisons_ = 0;
};

// The parser would take it for the end of the text and not look at the rest.
void require_no_zero_byte(std::string_view text, std::string_view source) {
  require(text.find('\0') == text.npos, "{}: broken JSON: byte {} is zero", source,
          text.find('\0'));
}

}  // namespace

std::string read_text_file(const std::string& path, int64_t max_bytes) {
  std::ifstream file(path, std::ios::binary);
  require(file.good(), "cannot open {}: {}", path, std::strerror(errno));
  std::string text;
  std::vector<char> piece(1 << 20);
  while (file.read(piece.data(), static_cast<std::streamsize>(piece.size())), file.gcount() > 0) {
    text.append(piece.data(), file.gcount());
    require(static_cast<int64_t>(text.size()) <= max_bytes,
            "{} is longer than {} bytes: not what its name says", path, max_bytes);
  }
  require(!file.bad() && file.eof(), "cannot read {}: {}", path, std::strerror(errno));
  return text;
}

nlohmann::json parse_json(std::string_view text, std::string_view source) {
  require_no_zero_byte(text, source);
  try {
    // The callback is passed as a function object that keeps its state, hence the lambda.
    Strict strict(source);
    return nlohmann::json::parse(
        text, [&](int depth, nlohmann::json::parse_event_t event, const nlohmann::json& value) {
          return strict(depth, event, value);
        });
  } catch (const nlohmann::json::exception& error) {
    fail("{}: broken JSON: {}", source, json_message(error));
  }
}

nlohmann::ordered_json parse_ordered_json(std::string_view text, std::string_view source) {
  using Ordered = nlohmann::ordered_json;
  require_no_zero_byte(text, source);
  try {
    Strict strict(source);
    return Ordered::parse(text, [&](int depth, Ordered::parse_event_t event, const Ordered& value) {
      const bool keep = strict(depth, event, value);
      require(strict.n_comparisons() <= kMostComparisons,
              "{}: its objects have too many keys: one may have about {}", source, 6000);
      return keep;
    });
  } catch (const nlohmann::json::exception& error) {
    fail("{}: broken JSON: {}", source, json_message(error));
  }
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

}  // namespace tandem
