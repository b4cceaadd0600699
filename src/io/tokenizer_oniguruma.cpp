// Oniguruma's syntax to PCRE2's. Whatever could mean something else in PCRE2 is either rewritten or
// refused.
#include <algorithm>
#include <array>
#include <vector>

#include "core/check.h"
#include "io/json.h"
#include "io/tokenizer_regex.h"
#include "io/utf8.h"

namespace tandem {
namespace {

// Unicode's White_Space, and everything else. PCRE2's own \s also has U+180E.
constexpr std::string_view kSpace =
    R"(\x09-\x0D\x20\x85\xA0\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000})";
constexpr std::string_view kNotSpace =
    R"(\x00-\x08\x0E-\x1F\x21-\x84\x86-\x9F\xA1-\x{167F}\x{1681}-\x{1FFF}\x{200B}-\x{2027})"
    R"(\x{202A}-\x{202E}\x{2030}-\x{205E}\x{2060}-\x{2FFF}\x{3001}-\x{10FFFF})";

constexpr std::array<std::string_view, 30> kCategories = {
    "Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Nl", "No", "Pc", "Pd", "Ps", "Pe",
    "Pi", "Pf", "Po", "Sm", "Sc", "Sk", "So", "Zs", "Zl", "Zp", "Cc", "Cf", "Cs", "Co", "Cn"};

class Translator {
 public:
  explicit Translator(std::string_view pattern) : pattern_(pattern) {}

  std::string run() {
    while (!at_end()) translate_one();
    return std::move(out_);
  }

 private:
  void translate_one();
  void translate_group();
  void translate_braces();
  void translate_class();
  std::string class_items();
  std::string class_difference(std::string_view items);
  std::string escape(bool in_class);
  std::string property(bool negated);
  std::string code_point(size_t min_digits, size_t max_digits, bool braces_allowed);

  bool at_end() const { return at_ == pattern_.size(); }
  bool starts(std::string_view text) const { return pattern_.substr(at_).starts_with(text); }
  char take() {
    if (at_end()) refuse("an unfinished construct at its end");
    return pattern_[at_++];
  }
  void expect(std::string_view text, std::string_view what) {
    if (!starts(text)) refuse(what);
    at_ += text.size();
  }
  [[noreturn]] void refuse(std::string_view what) const {
    fail("the split pattern {} has {} (near byte {}), which is not supported", shown(pattern_),
         what, at_);
  }

  std::string_view pattern_;
  size_t at_ = 0;
  std::string out_;
};

void Translator::translate_one() {
  switch (const char c = take()) {
    case '\\':
      out_ += escape(false);
      break;
    case '[':
      translate_class();
      break;
    case '(':
      translate_group();
      break;
    case '{':
      translate_braces();
      break;
    default:
      out_ += c;
  }
}

void Translator::translate_group() {
  out_ += '(';
  if (starts("*")) refuse("a group that starts with '*'");  // a verb in PCRE2
  if (!starts("?")) return;
  for (const std::string_view kind : {"?:", "?=", "?!", "?<=", "?<!", "?>", "?i:"})
    if (starts(kind)) {
      at_ += kind.size();
      out_ += kind;
      return;
    }
  refuse("a group of an unknown kind");
}

void Translator::translate_braces() {
  const size_t close = pattern_.find('}', at_);
  if (close == std::string_view::npos) refuse("a '{' without '}'");
  const std::string_view count = pattern_.substr(at_, close - at_);
  const bool plain = !count.empty() && count.front() != ',' &&
                     count.find_first_not_of("0123456789,") == std::string_view::npos;
  if (!plain) refuse("a '{' that is not a repeat count {n}, {n,} or {n,m}");
  at_ = close + 1;
  // A second quantifier there, possessive or lazy in PCRE2.
  if (starts("+") || starts("?")) refuse("a quantifier after a repeat count");
  out_.append("{").append(count).append("}");
}

void Translator::translate_class() {
  const bool negated = starts("^");
  if (negated) ++at_;
  std::string items = class_items();
  if (starts("&&")) {
    if (negated) refuse("a negated set with '&&'");
    items = class_difference(items);
  }
  expect("]", "a set without ']'");
  if (items.empty()) refuse("an empty set");
  out_ += items.starts_with("^") ? "[" + items + "]" : (negated ? "[^" : "[") + items + "]";
}

// Everything up to "]" or "&&".
std::string Translator::class_items() {
  std::string items;
  while (!at_end() && !starts("]") && !starts("&&")) {
    if (starts("[")) refuse("a set inside a set");
    const char c = take();
    if (c == '\\')
      items += escape(true);
    else if (c == '^')
      items += "\\^";
    else
      items += c;
  }
  return items;
}

// [A&&[^B]] is "neither outside A nor in B"; the outside of general categories is the other general
// categories.
std::string Translator::class_difference(std::string_view items) {
  expect("&&[^", "'&&' that is not followed by '[^'");
  const std::string subtracted = class_items();
  expect("]", "a set without ']'");
  std::vector<std::string_view> outside(kCategories.begin(), kCategories.end());
  while (!items.empty()) {
    const size_t close = items.find('}');
    if (!items.starts_with("\\p{") || close == std::string_view::npos)
      refuse("'&&' on a set of more than general categories");
    const std::string_view name = items.substr(3, close - 3);
    if (name.size() > 2) refuse("'&&' on a set of more than general categories");
    std::erase_if(outside, [&](std::string_view category) { return category.starts_with(name); });
    items.remove_prefix(close + 1);
  }
  std::string complement = "^";
  for (const std::string_view category : outside) complement += fmt::format("\\p{{{}}}", category);
  return complement + subtracted;
}

// The escape whose backslash has been taken.
std::string Translator::escape(bool in_class) {
  const char c = take();
  const auto unit = static_cast<unsigned char>(c);
  if (unit >= 0x80) return std::string(1, c);
  const bool alphanumeric =
      (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z');
  if (!alphanumeric) return unit < 0x20 || c == ' ' ? std::string(1, c) : std::string("\\") + c;
  switch (c) {
    case 'n':
    case 'r':
    case 't':
    case 'f':
      return std::string("\\") + c;
    case 'v':
      return "\\x0B";
    case 's':
    case 'S': {
      const std::string items(c == 's' ? kSpace : kNotSpace);
      return in_class ? items : "[" + items + "]";
    }
    case 'd':
      return "\\p{Nd}";
    case 'D':
      return "\\P{Nd}";
    case 'p':
    case 'P':
      return property(c == 'P');
    case 'u':
      return code_point(4, 4, false);
    case 'x':
      return code_point(1, 8, true);
    default:
      refuse(fmt::format("the escape \\{}", c));
  }
}

std::string Translator::property(bool negated) {
  expect("{", "a property without '{'");
  if (starts("^")) {
    ++at_;
    negated = !negated;
  }
  const size_t close = pattern_.find('}', at_);
  if (close == std::string_view::npos) refuse("a property without '}'");
  const std::string_view name = pattern_.substr(at_, close - at_);
  at_ = close + 1;
  const bool is_category = std::any_of(kCategories.begin(), kCategories.end(), [&](auto category) {
    return category == name || category.substr(0, 1) == name;
  });
  const bool is_word = !name.empty() && name.find_first_not_of(
                                            "ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghij"
                                            "klmnopqrstuvwxyz") == name.npos;
  if (!is_category && (!is_word || name.size() < 3)) refuse("a property of an unknown form");
  return fmt::format("\\{}{{{}{}}}", negated ? 'P' : 'p', is_category ? "" : "sc:", name);
}

std::string Translator::code_point(size_t min_digits, size_t max_digits, bool braces) {
  constexpr std::string_view kHex = "0123456789abcdefABCDEF";
  if (braces) expect("{", "\\x without '{'");
  const size_t end = std::min(pattern_.find_first_not_of(kHex, at_), pattern_.size());
  const size_t n = std::min(end - at_, max_digits);
  if (n < min_digits) refuse("a code point with too few digits");
  const std::string digits(pattern_.substr(at_, n));
  at_ += n;
  if (braces) expect("}", "\\x{ without '}'");
  return "\\x{" + digits + "}";
}

}  // namespace

std::string translate_oniguruma(std::string_view pattern) {
  // The same matches, but linear: without the look-behind every space of a run inside a line starts
  // a search to the end of the run. A leftmost match never starts inside a run, because the start
  // of the run would match too.
  if (pattern == R"(\s+$)") return fmt::format("(?<![{0}])[{0}]+$", kSpace);
  return Translator(pattern).run();
}

}  // namespace tandem
