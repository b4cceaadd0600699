// Sets of texts as automata over characters: what patterns, formats, lengths and excluded texts
// have in common, so that a text may be held to several of them.
#pragma once
#include <string>
#include <vector>

#include "io/grammar/characters.h"
#include "io/grammar/repetition.h"

namespace tandem {

// Begins in state 0. Several edges may go on with the same character.
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

// Automata of more states, or with more edges, are refused by an Error.
inline constexpr size_t kMostTextStates = 20'000, kMostTextEdges = 100'000;

TextAutomaton every_text();
TextAutomaton texts_in(const std::vector<std::string>& texts);

TextAutomaton union_of(const TextAutomaton& a, const TextAutomaton& b);
TextAutomaton intersection(const TextAutomaton& a, const TextAutomaton& b);
// Throws Error where the deterministic automaton that it takes is too large.
TextAutomaton complement(const TextAutomaton& automaton);

// Those of `min` to `max` characters; of a long way to a `max`, only as much as is not too large.
TextAutomaton of_length(const TextAutomaton& automaton, int min, int max);

bool matches(const TextAutomaton& automaton, const std::string& text);

void add_texts_of(Grammar& grammar, Grammar::Node from, Grammar::Node to,
                  const TextAutomaton& automaton, Writing writing);

}  // namespace tandem
