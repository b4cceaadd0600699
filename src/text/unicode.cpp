#include "text/unicode.h"

#include <algorithm>
#include <string>

#include "text/unicode_table.h"

namespace tandem {
namespace {

constexpr CharacterRange kSurrogates = {0xD800, 0xDFFF};

bool is_digit(char c) { return c >= '0' && c <= '9'; }

char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

// The form in which names of properties are compared (UAX44-LM3, without its prefix "is").
std::string normalized_name(std::string_view name) {
  std::string out;
  for (const char c : name) {
    if (c == '_' || c == '-' || c == ' ') continue;
    out += lower(c);
  }
  return out;
}

// The characters of `table` (runs of values of `n_letters` letters) whose value begins with
// `value`, which is in loose form and not longer than n_letters.
CharacterSet characters_of(std::string_view table, size_t n_letters, std::string_view value) {
  CharacterSet set;
  char32_t first = 0;
  for (size_t at = 0; at < table.size(); at += n_letters) {
    char32_t length = is_digit(table[at]) ? 0 : 1;
    for (; is_digit(table[at]); ++at) length = length * 10 + static_cast<char32_t>(table[at] - '0');
    if (std::equal(value.begin(), value.end(), table.begin() + static_cast<std::ptrdiff_t>(at),
                   [](char wanted, char letter) { return wanted == lower(letter); }))
      set.push_back({first, first + length - 1});
    first += length;
  }
  return normalised(std::move(set));
}

// The four-letter code of the script with this loose name or code; empty for any other name.
std::string script_code(std::string_view name) {
  constexpr std::string_view kNames = unicode_table::kScriptNames;
  for (size_t at = 0; at < kNames.size();) {
    const size_t end = kNames.find(' ', at);
    std::string code = normalized_name(kNames.substr(at, 4));
    if (name == code || name == normalized_name(kNames.substr(at + 4, end - at - 4))) return code;
    at = end + 1;
  }
  return {};
}

}  // namespace

CharacterSet normalised(CharacterSet set) {
  std::sort(set.begin(), set.end(), [](auto& a, auto& b) { return a.first < b.first; });
  CharacterSet out;
  const auto push = [&](char32_t first, char32_t last) {
    if (first > last) return;
    if (!out.empty() && first <= out.back().last + 1) {
      out.back().last = std::max(out.back().last, last);
    } else {
      out.push_back({first, last});
    }
  };
  for (const CharacterRange& range : set) {
    push(range.first, std::min<char32_t>(range.last, kSurrogates.first - 1));
    push(std::max<char32_t>(range.first, kSurrogates.last + 1),
         std::min(range.last, kLastCharacter));
  }
  return out;
}

CharacterSet inverted(const CharacterSet& set) {
  CharacterSet out;
  char32_t next = 0;
  for (const CharacterRange& range : normalised(set)) {
    if (range.first > next) out.push_back({next, range.first - 1});
    next = range.last + 1;
  }
  if (next <= kLastCharacter) out.push_back({next, kLastCharacter});
  return normalised(std::move(out));
}

CharacterSet intersection(const CharacterSet& a, const CharacterSet& b) {
  CharacterSet outside = inverted(a);
  const CharacterSet outside_b = inverted(b);
  outside.insert(outside.end(), outside_b.begin(), outside_b.end());
  return inverted(outside);
}

bool contains(const CharacterSet& set, char32_t c) {
  const auto after = std::upper_bound(
      set.begin(), set.end(), c, [](char32_t x, const auto& range) { return x < range.first; });
  return after != set.begin() && c <= std::prev(after)->last;
}

const CharacterSet& white_space() {
  static const CharacterSet kSpace = {
      {9, 13},          {' ', ' '},       {0x85, 0x85},     {0xA0, 0xA0},     {0x1680, 0x1680},
      {0x2000, 0x200A}, {0x2028, 0x2029}, {0x202F, 0x202F}, {0x205F, 0x205F}, {0x3000, 0x3000}};
  return kSpace;
}

std::optional<CharacterSet> characters_with(std::string_view property) {
  const std::string name = normalized_name(property);
  if (name == "cs") return CharacterSet{};  // surrogates are not characters
  if (name.size() == 1 || name.size() == 2) {
    CharacterSet set = characters_of(unicode_table::kCategories, 2, name);
    if (!set.empty()) return set;
  }
  const std::string code = script_code(name);
  if (code.empty()) return std::nullopt;
  return characters_of(unicode_table::kScripts, 4, code);
}

}  // namespace tandem
