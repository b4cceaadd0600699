// Regular expressions, as JSON Schema's "pattern" has them (ECMA-262), as part of a grammar.
#pragma once
#include <string_view>

#include "io/grammar/grammar.h"

namespace tandem {

enum class Writing { kRaw, kJson };  // kJson: as inside the quotes of a JSON string

// Texts that match come from `from` to `to`. Whole: the expression is the whole text; otherwise it
// may stand anywhere in it where "^" and "$" do not say more. Understood are characters, ".",
// classes, \d \w \s and their opposites, groups, alternatives and greedy quantifiers; throws Error
// for anything else, and for what is broken.
void add_pattern(Grammar& grammar, Grammar::Node from, Grammar::Node to, std::string_view pattern,
                 Writing writing, bool whole);

}  // namespace tandem
