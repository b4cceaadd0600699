#include "text/jinja/string_literal.h"

#include <algorithm>
#include <charconv>

#include "text/utf8.h"

namespace tandem::jinja {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Value of up to `most` digits in `base` at `at`, which is moved behind them.
std::optional<uint32_t> digits(std::string_view text, size_t& at, size_t most, int base) {
  const std::string_view part = text.substr(at, most);
  uint32_t value = 0;
  const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), value, base);
  if (error != std::errc()) return {};
  at += static_cast<size_t>(end - part.data());
  return value;
}

bool is_scalar(uint32_t c) { return c < 0xD800 || (c > 0xDFFF && c <= 0x10FFFF); }

// Decodes the escape whose letter is at `at`, which is moved behind it. False when the escape is
// not a character.
bool decode_escape(std::string_view text, size_t& at, std::string& out) {
  constexpr std::string_view kLetters = "\\'\"abfnrtv", kMeanings = "\\'\"\a\b\f\n\r\t\v";
  const char letter = text[at];
  if (const size_t known = kLetters.find(letter); known != kLetters.npos) {
    out += kMeanings[known];
    ++at;
    return true;
  }
  if (letter == '\n') {  // line continuation
    ++at;
    return true;
  }
  const size_t n_hex = letter == 'x' ? 2 : letter == 'u' ? 4 : letter == 'U' ? 8 : 0;
  std::optional<uint32_t> c;
  if (n_hex > 0) {
    const size_t end = ++at + n_hex;
    c = digits(text, at, n_hex, 16);
    if (at != end) return false;
  } else if (letter >= '0' && letter <= '7') {
    c = digits(text, at, 3, 8);
  } else {
    out += '\\';
    return letter != 'N';  // \N{name} is not supported
  }
  if (!c || !is_scalar(*c)) return false;
  append_utf8(out, *c);
  return true;
}

size_t digits_length(std::string_view text, size_t at) {
  const size_t begin = at;
  while (at < text.size() &&
         (is_digit(text[at]) ||
          (text[at] == '_' && at > begin && at + 1 < text.size() && is_digit(text[at + 1]))))
    ++at;
  return at - begin;
}

int base_of_prefix(std::string_view text) {
  if (text.size() < 3 || text[0] != '0') return 10;
  const char letter = static_cast<char>(text[1] | 0x20);
  return letter == 'x' ? 16 : letter == 'o' ? 8 : letter == 'b' ? 2 : 10;
}

}  // namespace

std::optional<std::string> decode_string_literal(std::string_view text) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    if (text[at] != '\\') {
      out += text[at++];
    } else if (++at >= text.size() || !decode_escape(text, at, out)) {
      return {};
    }
  }
  return out;
}

size_t number_length(std::string_view text, bool may_be_real) {
  if (base_of_prefix(text) != 10) {
    const size_t end = text.find_first_not_of("0123456789abcdefABCDEF_", 2);
    return std::min(end, text.size());
  }
  size_t n = digits_length(text, 0);
  if (!may_be_real) return n;
  if (n < text.size() && text[n] == '.')
    if (const size_t n_fraction = digits_length(text, n + 1)) n += 1 + n_fraction;
  if (n < text.size() && (text[n] | 0x20) == 'e') {
    const bool has_sign = n + 1 < text.size() && (text[n + 1] == '+' || text[n + 1] == '-');
    const size_t begin = n + 1 + (has_sign ? 1 : 0);
    if (const size_t n_exponent = digits_length(text, begin)) n = begin + n_exponent;
  }
  return n;
}

std::optional<Value> parse_number(std::string_view text) {
  std::string plain(text);
  std::erase(plain, '_');
  const int base = base_of_prefix(plain);
  if (base == 10 && plain.find_first_of(".eE") != plain.npos) {
    const std::optional<double> value = parse_real(plain);
    return value ? std::optional(real(*value)) : std::nullopt;
  }
  const std::string_view body = std::string_view(plain).substr(base == 10 ? 0 : 2);
  const std::optional<int64_t> value = parse_integer(body, base);
  return value ? std::optional(integer(*value)) : std::nullopt;
}

std::optional<int64_t> parse_integer(std::string_view text, int base) {
  const bool ends_in_underscore = text.ends_with('_') || text.starts_with('_');
  if (!ends_in_underscore && text.find('_') != text.npos && text.find("__") == text.npos) {
    std::string plain(text);
    std::erase(plain, '_');
    return parse_integer(plain, base);
  }
  if (text.starts_with('+') && !text.starts_with("+-")) text.remove_prefix(1);
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, base);
  if (error != std::errc() || end != text.data() + text.size()) return {};
  return value;
}

std::optional<double> parse_real(std::string_view text) {
  if (text.starts_with('+') && !text.starts_with("+-")) text.remove_prefix(1);
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc::invalid_argument || end != text.data() + text.size()) return {};
  if (error == std::errc::result_out_of_range) return {};
  return value;
}

}  // namespace tandem::jinja
