// Parses Oniguruma's syntax. A construct that has another meaning in PCRE2 is rewritten to an
// equivalent form or refused.
#include <algorithm>
#include <utility>
#include <vector>

#include "core/check.h"
#include "io/json.h"
#include "text/tokenizer_regex.h"
#include "text/utf8.h"

namespace tandem {
namespace {

bool is_ascii_letter(char32_t c) { return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z'); }
bool is_ascii_digit(char32_t c) { return c >= '0' && c <= '9'; }

CharacterSet one(char32_t c) { return {{c, c}}; }

void add(CharacterSet& set, const CharacterSet& more) {
  set.insert(set.end(), more.begin(), more.end());
  set = normalised(std::move(set));
}

class Parser {
 public:
  explicit Parser(std::string_view pattern) : pattern_(pattern) {
    require(find_invalid_utf8(pattern) == std::string_view::npos,
            "the split pattern {} is not valid UTF-8", shown(pattern));
    out_.source = pattern;
  }

  SplitPattern run() {
    while (!at_end()) parse_one();
    return std::move(out_);
  }

 private:
  void parse_one();
  void parse_group();
  void parse_repeat();
  CharacterSet parse_set();
  CharacterSet set_items();
  char32_t set_range_end(char32_t first);
  CharacterSet escape();
  CharacterSet property(bool negated);
  char32_t code_point(size_t min_digits, size_t max_digits, bool braces);
  void put_literal(char32_t c);
  void put(const CharacterSet& set);
  void put(std::string_view syntax);
  CharacterSet both_cases(const CharacterSet& set) const;

  bool at_end() const { return at_ == pattern_.size(); }
  bool starts(std::string_view text) const { return pattern_.substr(at_).starts_with(text); }
  bool skip(std::string_view text) {
    const bool found = starts(text);
    if (found) at_ += text.size();
    return found;
  }
  char32_t take() {
    if (at_end()) refuse("an unfinished construct at its end");
    const CodePoint c = decode_utf8(pattern_, at_);
    at_ += c.n_bytes;
    return c.value;
  }
  void expect(std::string_view text, std::string_view what) {
    if (!skip(text)) refuse(what);
  }
  [[noreturn]] void refuse(std::string_view what) const {
    fail("the split pattern {} has {} (near byte {}), which is not supported", shown(pattern_),
         what, at_);
  }

  std::string_view pattern_;
  size_t at_ = 0;
  // [open groups, the whole pattern first] whether the group ignores case
  std::vector<bool> caseless_ = {false};
  char32_t literal_before_ = 0;  // the literal character just before; 0: none
  SplitPattern out_;
};

void Parser::parse_one() {
  const char32_t before = std::exchange(literal_before_, 0);
  switch (const char32_t c = take()) {
    case '\\':
      return put(caseless_.back() ? both_cases(escape()) : escape());
    case '[':
      return put(parse_set());
    case '.':
      return put(inverted(one('\n')));
    case '(':
      return parse_group();
    case ')':
      if (caseless_.size() == 1) refuse("a ')' without '('");
      caseless_.pop_back();
      return put(")");
    case '{':
      return parse_repeat();
    case '|':
    case '*':
    case '+':
    case '?':
    case '^':
    case '$':
      return put(std::string(1, static_cast<char>(c)));
    default:
      literal_before_ = before;
      put_literal(c);
  }
}

void Parser::parse_group() {
  if (starts("*")) refuse("a group that starts with '*'");  // a verb in PCRE2
  std::string_view kind;
  for (const std::string_view known : {"?:", "?=", "?!", "?<=", "?<!", "?>", "?i:"})
    if (kind.empty() && skip(known)) kind = known;
  if (starts("?")) refuse("an unknown kind of group");
  caseless_.push_back(caseless_.back() || kind == "?i:");
  put(fmt::format("({}", kind == "?i:" ? "?:" : kind));
}

void Parser::parse_repeat() {
  const size_t close = pattern_.find('}', at_);
  if (close == std::string_view::npos) refuse("a '{' without '}'");
  const std::string_view count = pattern_.substr(at_, close - at_);
  const bool plain = !count.empty() && count.front() != ',' &&
                     count.find_first_not_of("0123456789,") == std::string_view::npos;
  if (!plain) refuse("a '{' that is not a repeat count {n}, {n,} or {n,m}");
  at_ = close + 1;
  // Oniguruma reads a second quantifier, PCRE2 a possessive or lazy one.
  if (starts("+") || starts("?")) refuse("a quantifier after a repeat count");
  put(fmt::format("{{{}}}", count));
}

// Parses a set whose "[" has been taken. "&&" has the lowest precedence: [ab&&cd] is the
// intersection of [ab] and [cd].
CharacterSet Parser::parse_set() {
  const bool negated = skip("^");
  CharacterSet set = set_items();
  while (skip("&&")) set = intersection(set, set_items());
  expect("]", "a set without ']'");
  if (caseless_.back()) {
    if (negated) refuse("a negated set in a case-insensitive group");
    set = both_cases(set);
  }
  return negated ? inverted(set) : set;
}

// The union of all items up to "]" or "&&".
CharacterSet Parser::set_items() {
  CharacterSet set;
  bool empty = true;
  for (; !at_end() && !starts("]") && !starts("&&"); empty = false) {
    if (starts("[:")) refuse("a POSIX bracket");
    if (skip("[")) {
      add(set, parse_set());
      continue;
    }
    const char32_t c = take();
    CharacterSet item = c == '\\' ? escape() : one(c);
    const bool is_character = item.size() == 1 && item[0].first == item[0].last;
    const bool is_range = starts("-") && !starts("-]") && !starts("-&&");
    if (is_range) {
      ++at_;
      if (!is_character) refuse("a range of characters that begins with a set");
      item[0].last = set_range_end(item[0].first);
      if (skip("-")) add(set, one('-'));  // [a-c-e]
    }
    add(set, item);
  }
  if (empty) refuse("an empty set");
  return set;
}

char32_t Parser::set_range_end(char32_t first) {
  const char32_t c = take();
  if (c == '[') refuse("a range of characters that ends with a set");
  const CharacterSet end = c == '\\' ? escape() : one(c);
  if (end.size() != 1 || end[0].first != end[0].last)
    refuse("a range of characters that ends with a set");
  if (end[0].first < first) refuse("a range of characters that ends before it begins");
  return end[0].first;
}

// Parses an escape whose backslash has been taken.
CharacterSet Parser::escape() {
  const char32_t c = take();
  if (!is_ascii_letter(c) && !is_ascii_digit(c)) return one(c);
  switch (c) {
    case 'n':
      return one('\n');
    case 'r':
      return one('\r');
    case 't':
      return one('\t');
    case 'f':
      return one('\f');
    case 'v':
      return one('\v');
    case 's':
      return white_space();
    case 'S':
      return inverted(white_space());
    case 'd':
      return *characters_with("Nd");
    case 'D':
      return inverted(*characters_with("Nd"));
    case 'p':
    case 'P':
      return property(c == 'P');
    case 'u':
      return one(code_point(4, 4, false));
    case 'x':
      return one(code_point(1, 8, true));
    default:
      refuse(fmt::format("the escape \\{}", static_cast<char>(c)));
  }
}

CharacterSet Parser::property(bool negated) {
  expect("{", "a property without '{'");
  if (skip("^")) negated = !negated;
  const size_t close = pattern_.find('}', at_);
  if (close == std::string_view::npos) refuse("a property without '}'");
  const std::string_view name = pattern_.substr(at_, close - at_);
  const std::optional<CharacterSet> set = characters_with(name);
  if (!set)
    refuse(fmt::format("the property {}, which is neither a general category nor a script",
                       shown(name)));
  at_ = close + 1;
  return negated ? inverted(*set) : *set;
}

char32_t Parser::code_point(size_t min_digits, size_t max_digits, bool braces) {
  constexpr std::string_view kHex = "0123456789abcdefABCDEF";
  if (braces) expect("{", "\\x without '{'");
  const size_t end = std::min(pattern_.find_first_not_of(kHex, at_), pattern_.size());
  const size_t n = std::min(end - at_, max_digits);
  if (n < min_digits) refuse("a code point with too few digits");
  const auto value =
      static_cast<char32_t>(std::stoul(std::string(pattern_.substr(at_, n)), nullptr, 16));
  at_ += n;
  if (braces) expect("}", "\\x{ without '}'");
  if (value > kLastCharacter || (value >= 0xD800 && value < 0xE000))
    refuse("an invalid code point");
  return value;
}

// Refuses letter pairs that Oniguruma, when it ignores case, also matches with a ligature.
void Parser::put_literal(char32_t c) {
  if (caseless_.back() && is_ascii_letter(c)) {
    const std::string pair = {static_cast<char>(literal_before_ | 0x20),
                              static_cast<char>(c | 0x20)};
    for (const char* ligature : {"ff", "fi", "fl", "ss", "st"})
      if (pair == ligature) refuse(fmt::format("\"{}\" in a case-insensitive group", ligature));
  }
  put(caseless_.back() ? both_cases(one(c)) : one(c));
  literal_before_ = c;
}

void Parser::put(const CharacterSet& set) { out_.parts.push_back({"", set, true}); }

void Parser::put(std::string_view syntax) {
  out_.parts.push_back({std::string(syntax), {}, false});
}

// Besides the other ASCII case, "s" and "k" each have a case variant outside ASCII.
CharacterSet Parser::both_cases(const CharacterSet& set) const {
  CharacterSet both = set;
  for (const CharacterRange& range : set) {
    if (range.last >= 0x80) refuse("a character outside ASCII in a case-insensitive group");
    for (char32_t c = range.first; c <= range.last; ++c) {
      if (is_ascii_letter(c)) both.push_back({c ^ 0x20, c ^ 0x20});
      if ((c | 0x20) == 's') both.push_back({0x17F, 0x17F});
      if ((c | 0x20) == 'k') both.push_back({0x212A, 0x212A});
    }
  }
  return normalised(std::move(both));
}

}  // namespace

SplitPattern parse_oniguruma(std::string_view pattern) {
  // Has the same matches in linear time: without the look-behind, every space of a run inside a
  // line starts a search to the end of the run. A leftmost match never starts inside a run, because
  // the start of the run would match too.
  if (pattern == R"(\s+$)") return Parser(R"((?<!\s)\s+$)").run();
  return Parser(pattern).run();
}

}  // namespace tandem
