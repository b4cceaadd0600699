// Sets of texts as finite automata over characters, so that patterns, formats, lengths and excluded
// texts can be combined.
#pragma once
#include <string>
#include <vector>

#include "text/grammar/json_rules.h"

namespace tandem {

// Starts in state 0. Nondeterministic: several edges may read the same character.
struct TextAutomaton {
  struct Edge {
    CharacterSet set;
    int32_t to;
  };
  struct State {
    std::vector<Edge> edges;
    bool accepts = false;
  };
  std::vector<State> states = {{}};
};

// Automata with more states or edges are refused with an Error.
inline constexpr size_t kMaxTextStates = 20'000, kMaxTextEdges = 100'000;

TextAutomaton every_text();
TextAutomaton texts_in(const std::vector<std::string>& texts);

TextAutomaton union_of(const TextAutomaton& a, const TextAutomaton& b);
TextAutomaton intersection(const TextAutomaton& a, const TextAutomaton& b);
// Throws Error if the deterministic automaton that this needs is too large.
TextAutomaton complement(const TextAutomaton& automaton);

// The texts of `min` to `max` characters. If `max` would take too many states, the longest texts
// are omitted.
TextAutomaton with_length(const TextAutomaton& automaton, int min, int max);

bool matches(const TextAutomaton& automaton, const std::string& text);

void add_automaton(Grammar& grammar, Grammar::Node from, Grammar::Node to,
                   const TextAutomaton& automaton, Escaping escaping);

}  // namespace tandem
