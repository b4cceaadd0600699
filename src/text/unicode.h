// Sets of Unicode characters and their properties. The properties come from our own table
// (tools/unicode_table.py), so they do not depend on libraries or the system.
#pragma once
#include <optional>
#include <string_view>
#include <vector>

namespace tandem {

inline constexpr std::string_view kUnicodeVersion = "16.0.0";
inline constexpr char32_t kLastCharacter = 0x10FFFF;

struct CharacterRange {
  char32_t first, last;
  // clang-tidy 14 takes the 0 that results are compared with for a null pointer.
  auto operator<=>(const CharacterRange&) const = default;  // NOLINT(modernize-use-nullptr)
};
// Normalised: ascending, not adjacent, without surrogates.
using CharacterSet = std::vector<CharacterRange>;

CharacterSet normalised(CharacterSet set);
CharacterSet inverted(const CharacterSet& set);
CharacterSet intersection(const CharacterSet& a, const CharacterSet& b);
// `set` must be normalised.
bool contains(const CharacterSet& set, char32_t c);

// Unicode's White_Space. Its 25 characters have been the same since Unicode 6.3.
const CharacterSet& white_space();

// Characters of a general category ("Lu", or "L" for all that begin with L) or of a script ("Han");
// nullopt for any other name. Case, "_", "-" and " " are ignored in names. A script means the
// property Script, not Script_Extensions.
std::optional<CharacterSet> characters_with(std::string_view property);

}  // namespace tandem
