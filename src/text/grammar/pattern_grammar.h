// Regular expressions of JSON Schema's "pattern" (ECMA-262) as part of a grammar.
#pragma once
#include <string_view>

#include "text/grammar/text_automaton.h"

namespace tandem {

// An automaton of the texts that match. If `full_match`, the expression must match the whole text;
// otherwise any part of it, subject to "^" and "$". Supports characters, ".", classes, \d \w \s and
// their complements, groups, alternatives, quantifiers, and lookahead, (?= and (?!, directly after
// "^". Throws Error for anything else and for syntax errors.
TextAutomaton pattern_automaton(std::string_view pattern, bool full_match);

// Adds the texts that match as a whole between `from` and `to`.
void add_pattern(Grammar& grammar, Grammar::Node from, Grammar::Node to, std::string_view pattern,
                 Escaping escaping);

}  // namespace tandem
