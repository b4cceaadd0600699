#include "text/jinja/lexer.h"

#include <algorithm>
#include <charconv>

#include "text/jinja/text_functions.h"
#include "text/utf8.h"

namespace tandem::jinja {

namespace {

constexpr size_t kMaxSourceBytes = size_t{1} << 20;

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_name_start(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' ||
         static_cast<unsigned char>(c) >= 0x80;
}

// Converts line breaks as Python's universal newlines does; drops one newline at the end of the
// source.
std::string normalize_newlines(std::string_view source) {
  std::string out;
  for (size_t at = 0; at < source.size(); ++at) {
    if (source[at] != '\r') {
      out += source[at];
    } else {
      out += '\n';
      if (at + 1 < source.size() && source[at + 1] == '\n') ++at;
    }
  }
  if (!out.empty() && out.back() == '\n') out.pop_back();
  return out;
}

class Lexer {
 public:
  explicit Lexer(std::string source) : source_(std::move(source)) {}

  std::vector<Token> run() {
    while (at_ < source_.size()) read_text();
    add(TokenKind::kEnd, "");
    return std::move(tokens_);
  }

 private:
  void read_text();
  void read_comment();
  void read_raw();
  void read_tag(bool is_block);
  bool take_tag_end(bool is_block);
  void read_token();
  void number();
  void name();
  void string_literal();
  void symbol();

  std::string_view rest() const { return std::string_view(source_).substr(at_); }
  char peek(size_t ahead) const {
    return at_ + ahead < source_.size() ? source_[at_ + ahead] : '\0';
  }
  void advance(size_t n) {
    line_ +=
        static_cast<int>(std::count(source_.begin() + static_cast<std::ptrdiff_t>(at_),
                                    source_.begin() + static_cast<std::ptrdiff_t>(at_ + n), '\n'));
    at_ += n;
    at_line_start_ = n > 0 ? source_[at_ - 1] == '\n' : at_line_start_;
  }
  void skip_spaces() { advance(rest().size() - strip(rest(), Side::kLeft).size()); }
  void skip_newline() {
    if (peek(0) == '\n') advance(1);
  }
  void add(TokenKind kind, std::string text, Value value = {}) {
    tokens_.push_back({kind, line_, std::move(text), value});
  }
  void add_text(std::string_view text, char control, bool may_strip_line);
  bool take_raw_tag(std::string_view word, size_t& n_bytes) const;

  std::string source_;
  size_t at_ = 0;
  int line_ = 1;
  bool at_line_start_ = true;
  std::vector<char> brackets_;
  std::vector<Token> tokens_;
};

// Reads text up to the next tag, and then the tag.
void Lexer::read_text() {
  size_t length = 0;
  const std::string_view text = rest();
  for (;; ++length) {
    length = text.find('{', length);
    if (length == std::string_view::npos || length + 1 >= text.size()) {
      add(TokenKind::kText, std::string(text));
      return advance(text.size());
    }
    const char next = text[length + 1];
    if (next == '{' || next == '%' || next == '#') break;
  }
  const char kind = text[length + 1];
  const char control = length + 2 < text.size() ? text[length + 2] : '\0';
  const size_t n_control = control == '-' || control == '+' ? 1 : 0;
  add_text(text.substr(0, length), control, kind != '{');
  advance(length);
  size_t n_raw = 0;
  if (kind == '%' && take_raw_tag("raw", n_raw)) {
    advance(n_raw);
    return read_raw();
  }
  advance(2 + n_control);
  if (kind == '#') return read_comment();
  add(kind == '{' ? TokenKind::kPrintBegin : TokenKind::kBlockBegin, "");
  read_tag(kind == '%');
}

void Lexer::add_text(std::string_view text, char control, bool may_strip_line) {
  if (control == '-') {
    text = strip(text, Side::kRight);
  } else if (control != '+' && may_strip_line) {
    const size_t line = text.rfind('\n') + 1;  // npos + 1 is 0
    if ((line > 0 || at_line_start_) && strip(text.substr(line), Side::kLeft).empty())
      text = text.substr(0, line);
  }
  if (!text.empty()) add(TokenKind::kText, std::string(text));
}

void Lexer::read_comment() {
  const size_t end = rest().find("#}");
  if (end == std::string_view::npos) fail_at(line_, "a comment {{# is not closed by #}}");
  const char control = end > 0 ? rest()[end - 1] : '\0';
  advance(end + 2);
  if (control == '-')
    skip_spaces();
  else if (control != '+')
    skip_newline();
}

// Whether the tag {% word %}, with any whitespace control, begins here. n_bytes is its length
// including the whitespace that it removes after it.
bool Lexer::take_raw_tag(std::string_view word, size_t& n_bytes) const {
  std::string_view text = rest();
  if (!text.starts_with("{%")) return false;
  text.remove_prefix(2);
  if (text.starts_with('-') || text.starts_with('+')) text.remove_prefix(1);
  text = strip(text, Side::kLeft);
  if (!text.starts_with(word)) return false;
  text = strip(text.substr(word.size()), Side::kLeft);
  const bool strips = text.starts_with('-');
  const bool keeps = text.starts_with('+');
  if (strips || (keeps && word == "endraw")) text.remove_prefix(1);
  if (!text.starts_with("%}")) return false;
  text.remove_prefix(2);
  if (strips)
    text = strip(text, Side::kLeft);
  else if (!keeps && word == "endraw" && text.starts_with('\n'))
    text.remove_prefix(1);
  n_bytes = rest().size() - text.size();
  return true;
}

void Lexer::read_raw() {
  const std::string_view text = rest();
  const size_t start = at_;
  size_t n_bytes = 0;
  for (size_t end = text.find("{%"); end != text.npos; end = text.find("{%", end + 1)) {
    at_ = start + end;
    const bool ends = take_raw_tag("endraw", n_bytes);
    at_ = start;
    if (!ends) continue;
    add_text(text.substr(0, end), text[end + 2], true);
    return advance(end + n_bytes);
  }
  fail_at(line_, "{{% raw %}} is not closed by {{% endraw %}}");
}

void Lexer::read_tag(bool is_block) {
  brackets_.clear();
  while (true) {
    skip_spaces();
    if (at_ >= source_.size()) fail_at(line_, "a tag is not closed by {}", is_block ? "%}" : "}}");
    if (brackets_.empty() && take_tag_end(is_block)) return;
    read_token();
  }
}

bool Lexer::take_tag_end(bool is_block) {
  const char control = peek(0);
  const bool has_control = control == '-' || (is_block && control == '+');
  const size_t n_control = has_control ? 1 : 0;
  if (!rest().substr(n_control).starts_with(is_block ? "%}" : "}}")) return false;
  add(is_block ? TokenKind::kBlockEnd : TokenKind::kPrintEnd, "");
  advance(n_control + 2);
  if (has_control && control == '-')
    skip_spaces();
  else if (is_block && !has_control)
    skip_newline();
  return true;
}

void Lexer::read_token() {
  const char c = peek(0);
  if (is_digit(c)) return number();
  if (is_name_start(c)) return name();
  if (c == '\'' || c == '"') return string_literal();
  symbol();
}

void Lexer::name() {
  size_t n = 1;
  while (is_name_start(peek(n)) || is_digit(peek(n))) ++n;
  add(TokenKind::kName, std::string(rest().substr(0, n)));
  advance(n);
}

void Lexer::number() {
  const size_t n_bytes = number_length(rest(), !tokens_.back().is_symbol("."));
  const std::string_view text = rest().substr(0, n_bytes);
  const std::optional<Value> value = parse_number(text);
  if (!value) fail_at(line_, "the number {} is invalid or exceeds 64 bits", text);
  add(value->is(Kind::kInt) ? TokenKind::kInteger : TokenKind::kReal, std::string(text), *value);
  advance(n_bytes);
}

void Lexer::string_literal() {
  const char quote = peek(0);
  size_t n = 1;
  while (peek(n) != quote) {
    if (at_ + n >= source_.size()) fail_at(line_, "a string is not closed by {}", quote);
    n += peek(n) == '\\' ? 2 : 1;
  }
  const std::optional<std::string> text = decode_string_literal(rest().substr(1, n - 1));
  if (!text) fail_at(line_, "a string contains an invalid escape");
  add(TokenKind::kString, *text);
  advance(n + 1);
}

void Lexer::symbol() {
  constexpr std::string_view kSymbols[] = {"//", "**", "==", "!=", ">=", "<=", "+", "-", "/",
                                           "*",  "%",  "~",  "[",  "]",  "(",  ")", "{", "}",
                                           ">",  "<",  "=",  ".",  ":",  "|",  ",", ";"};
  const auto found = std::find_if(std::begin(kSymbols), std::end(kSymbols),
                                  [&](std::string_view s) { return rest().starts_with(s); });
  if (found == std::end(kSymbols)) fail_at(line_, "unexpected character '{}'", peek(0));
  const char c = found->front();
  if (c == '(' || c == '[' || c == '{') brackets_.push_back(c == '(' ? ')' : c == '[' ? ']' : '}');
  if (c == ')' || c == ']' || c == '}') {
    if (brackets_.empty() || brackets_.back() != c) fail_at(line_, "unexpected '{}'", c);
    brackets_.pop_back();
  }
  add(TokenKind::kSymbol, std::string(*found));
  advance(found->size());
}

}  // namespace

std::vector<Token> tokenize(std::string_view source) {
  require(source.size() <= kMaxSourceBytes,
          "the chat template has {} bytes; at most {} are supported", source.size(),
          kMaxSourceBytes);
  const size_t bad = find_invalid_utf8(source);
  require(bad == std::string_view::npos, "the chat template is not UTF-8 at byte {}", bad);
  return Lexer(normalize_newlines(source)).run();
}

namespace {

// Value of up to `most` digits in `base` at `at`, which is moved past them.
std::optional<uint32_t> digits(std::string_view text, size_t& at, size_t most, int base) {
  const std::string_view part = text.substr(at, most);
  uint32_t value = 0;
  const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), value, base);
  if (error != std::errc()) return {};
  at += static_cast<size_t>(end - part.data());
  return value;
}

bool is_scalar(uint32_t c) { return c < 0xD800 || (c > 0xDFFF && c <= 0x10FFFF); }

// Decodes the escape whose letter is at `at`, which is moved past it. False when the escape is
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
