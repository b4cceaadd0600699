// Sets of Unicode characters, and how a grammar reads one of a set.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "io/grammar/grammar.h"
#include "io/grammar/pattern_grammar.h"

namespace tandem {

struct CharacterRange {
  char32_t first, last;
};
// Ascending, apart from each other, without surrogates.
using CharacterSet = std::vector<CharacterRange>;

// Of well-formed UTF-8.
std::u32string characters_of(std::string_view text);

CharacterSet normalised(CharacterSet set);
CharacterSet inverted(const CharacterSet& set);

// In UTF-8; in JSON, what must be escaped is, in one way, and nothing else.
void add_characters(Grammar& grammar, Grammar::Node from, Grammar::Node to, const CharacterSet& set,
                    Writing writing);

}  // namespace tandem
