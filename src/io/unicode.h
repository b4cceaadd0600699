// Sets of Unicode characters, and which characters have a property. The properties come from a
// table of ours (tools/unicode_table.py), so they are the same with any library and on any system.
#pragma once
#include <optional>
#include <string_view>
#include <vector>

namespace tandem {

inline constexpr std::string_view kUnicodeVersion = "16.0.0";
inline constexpr char32_t kLastCharacter = 0x10FFFF;

struct CharacterRange {
  char32_t first, last;
  auto operator<=>(const CharacterRange&) const = default;
};
// Ascending, apart from each other, without surrogates.
using CharacterSet = std::vector<CharacterRange>;

CharacterSet normalised(CharacterSet set);
CharacterSet inverted(const CharacterSet& set);
CharacterSet intersection(const CharacterSet& a, const CharacterSet& b);
// `set` must be normalised.
bool contains(const CharacterSet& set, char32_t c);

// Unicode's White_Space. Its 25 characters have been the same since Unicode 6.3.
const CharacterSet& white_space();

// Characters of a general category ("Lu", or "L" for all that begin so) or of a script ("Han"),
// nothing for another name. The letters' case, "_", "-" and " " make no difference. A script is the
// property Script, not Script_Extensions.
std::optional<CharacterSet> characters_with(std::string_view property);

}  // namespace tandem
