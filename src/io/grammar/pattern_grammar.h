// Regular expressions, as JSON Schema's "pattern" has them (ECMA-262), as part of a grammar.
#pragma once
#include <string_view>

#include "io/grammar/text_automaton.h"

namespace tandem {

// The texts that match. Whole: the expression is the whole text; otherwise it may stand anywhere in
// it where "^" and "$" do not say more. Understood are characters, ".", classes, \d \w \s and their
// opposites, groups, alternatives, quantifiers, and what is ahead, (?= and (?!, right after "^";
// throws Error for anything else, and for what is broken.
TextAutomaton pattern_automaton(std::string_view pattern, bool whole);

// Texts that match as a whole come from `from` to `to`.
void add_pattern(Grammar& grammar, Grammar::Node from, Grammar::Node to, std::string_view pattern,
                 Writing writing);

}  // namespace tandem
