#include "text/jinja/lexer.h"

#include <algorithm>
#include <charconv>

#include "text/jinja/characters.h"
#include "text/jinja/string_literal.h"
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
    while (at_ < source_.size()) outside();
    add(TokenKind::kEnd, "");
    return std::move(tokens_);
  }

 private:
  void outside();
  void comment();
  void raw();
  void inside(bool is_block);
  bool take_end(bool is_block);
  void inside_token();
  void number();
  void name();
  void string_literal();
  void sign();

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
  void add_text(std::string_view text, char sign, bool may_strip_line);
  bool take_raw_tag(std::string_view word, size_t& n_bytes) const;

  std::string source_;
  size_t at_ = 0;
  int line_ = 1;
  bool at_line_start_ = true;
  std::vector<char> brackets_;
  std::vector<Token> tokens_;
};

// Reads text up to the next tag, and then the tag.
void Lexer::outside() {
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
  const char sign = length + 2 < text.size() ? text[length + 2] : '\0';
  const size_t n_sign = sign == '-' || sign == '+' ? 1 : 0;
  add_text(text.substr(0, length), sign, kind != '{');
  advance(length);
  size_t n_raw = 0;
  if (kind == '%' && take_raw_tag("raw", n_raw)) {
    advance(n_raw);
    return raw();
  }
  advance(2 + n_sign);
  if (kind == '#') return comment();
  add(kind == '{' ? TokenKind::kPrintBegin : TokenKind::kBlockBegin, "");
  inside(kind == '%');
}

void Lexer::add_text(std::string_view text, char sign, bool may_strip_line) {
  if (sign == '-') {
    text = strip(text, Side::kRight);
  } else if (sign != '+' && may_strip_line) {
    const size_t line = text.rfind('\n') + 1;  // npos + 1 is 0
    if ((line > 0 || at_line_start_) && strip(text.substr(line), Side::kLeft).empty())
      text = text.substr(0, line);
  }
  if (!text.empty()) add(TokenKind::kText, std::string(text));
}

void Lexer::comment() {
  const size_t end = rest().find("#}");
  if (end == std::string_view::npos) fail_at(line_, "a comment {{# has no end #}}");
  const char sign = end > 0 ? rest()[end - 1] : '\0';
  advance(end + 2);
  if (sign == '-')
    skip_spaces();
  else if (sign != '+')
    skip_newline();
}

// Whether the tag {% word %}, with any whitespace signs, begins here. n_bytes is its length
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

void Lexer::raw() {
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
  fail_at(line_, "{{% raw %}} has no {{% endraw %}}");
}

void Lexer::inside(bool is_block) {
  brackets_.clear();
  while (true) {
    skip_spaces();
    if (at_ >= source_.size()) fail_at(line_, "a tag has no end {}", is_block ? "%}" : "}}");
    if (brackets_.empty() && take_end(is_block)) return;
    inside_token();
  }
}

bool Lexer::take_end(bool is_block) {
  const char sign = peek(0);
  const bool has_sign = sign == '-' || (is_block && sign == '+');
  const size_t n_sign = has_sign ? 1 : 0;
  if (!rest().substr(n_sign).starts_with(is_block ? "%}" : "}}")) return false;
  add(is_block ? TokenKind::kBlockEnd : TokenKind::kPrintEnd, "");
  advance(n_sign + 2);
  if (has_sign && sign == '-')
    skip_spaces();
  else if (is_block && !has_sign)
    skip_newline();
  return true;
}

void Lexer::inside_token() {
  const char c = peek(0);
  if (is_digit(c)) return number();
  if (is_name_start(c)) return name();
  if (c == '\'' || c == '"') return string_literal();
  sign();
}

void Lexer::name() {
  size_t n = 1;
  while (is_name_start(peek(n)) || is_digit(peek(n))) ++n;
  add(TokenKind::kName, std::string(rest().substr(0, n)));
  advance(n);
}

void Lexer::number() {
  const size_t n_bytes = number_length(rest(), !tokens_.back().is_sign("."));
  const std::string_view text = rest().substr(0, n_bytes);
  const std::optional<Value> value = parse_number(text);
  if (!value) fail_at(line_, "the number {} is beyond 64 bits or misspelt", text);
  add(value->is(Kind::kInt) ? TokenKind::kInteger : TokenKind::kReal, std::string(text), *value);
  advance(n_bytes);
}

void Lexer::string_literal() {
  const char quote = peek(0);
  size_t n = 1;
  while (peek(n) != quote) {
    if (at_ + n >= source_.size()) fail_at(line_, "a string has no closing {}", quote);
    n += peek(n) == '\\' ? 2 : 1;
  }
  const std::optional<std::string> text = decode_string_literal(rest().substr(1, n - 1));
  if (!text) fail_at(line_, "a string has an escape that is no character");
  add(TokenKind::kString, *text);
  advance(n + 1);
}

void Lexer::sign() {
  constexpr std::string_view kSigns[] = {"//", "**", "==", "!=", ">=", "<=", "+", "-", "/",
                                         "*",  "%",  "~",  "[",  "]",  "(",  ")", "{", "}",
                                         ">",  "<",  "=",  ".",  ":",  "|",  ",", ";"};
  const auto found = std::find_if(std::begin(kSigns), std::end(kSigns),
                                  [&](std::string_view s) { return rest().starts_with(s); });
  if (found == std::end(kSigns)) fail_at(line_, "unexpected character '{}'", peek(0));
  const char c = found->front();
  if (c == '(' || c == '[' || c == '{') brackets_.push_back(c == '(' ? ')' : c == '[' ? ']' : '}');
  if (c == ')' || c == ']' || c == '}') {
    if (brackets_.empty() || brackets_.back() != c) fail_at(line_, "unexpected '{}'", c);
    brackets_.pop_back();
  }
  add(TokenKind::kSign, std::string(*found));
  advance(found->size());
}

}  // namespace

std::vector<Token> tokenize(std::string_view source) {
  require(source.size() <= kMaxSourceBytes, "the chat template has {} bytes; at most {} are read",
          source.size(), kMaxSourceBytes);
  const size_t bad = find_invalid_utf8(source);
  require(bad == std::string_view::npos, "the chat template is not UTF-8 at byte {}", bad);
  return Lexer(normalize_newlines(source)).run();
}

}  // namespace tandem::jinja
