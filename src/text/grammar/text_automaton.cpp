#include "text/grammar/text_automaton.h"

#include <algorithm>
#include <map>
#include <utility>

#include "core/check.h"

namespace tandem {
namespace {

constexpr size_t kMaxComplementSteps = 2'000'000;  // (character range, state) pairs in complement()

// Builds an automaton whose states are identified by keys, in the order of their discovery.
template <class Key>
class AutomatonBuilder {
 public:
  explicit AutomatonBuilder(Key start) { id(std::move(start)); }

  int32_t id(Key key) {
    const auto [it, is_new] = ids_.try_emplace(std::move(key), static_cast<int32_t>(keys_.size()));
    if (!is_new) return it->second;
    require(keys_.size() < kMaxTextStates, "too large: more than {} states of strings",
            kMaxTextStates);
    keys_.push_back(&it->first);
    automaton.states.resize(keys_.size());
    return it->second;
  }
  void edge(size_t from, CharacterSet set, Key to) {
    if (set.empty()) return;
    require(++n_edges_ <= kMaxTextEdges, "too large: more than {} edges of strings", kMaxTextEdges);
    const int32_t to_id = id(std::move(to));
    automaton.states[from].edges.push_back({std::move(set), to_id});
  }
  bool has(size_t i) const { return i < keys_.size(); }
  const Key& key(size_t i) const { return *keys_[i]; }

  TextAutomaton automaton = {.states = {}};

 private:
  std::map<Key, int32_t> ids_;
  std::vector<const Key*> keys_;
  size_t n_edges_ = 0;
};

// Divides all characters into ranges on which every edge of these states is constant; returns the
// first character of each range.
std::vector<char32_t> range_starts(const TextAutomaton& automaton,
                                   const std::vector<int32_t>& states) {
  std::vector<char32_t> range_starts;
  for (const CharacterRange& range : kAnyCharacter) range_starts.push_back(range.first);
  for (const int32_t state : states)
    for (const TextAutomaton::Edge& edge : automaton.states[state].edges)
      for (const CharacterRange& range : edge.set) {
        range_starts.push_back(range.first);
        range_starts.push_back(range.last + 1);
      }
  std::sort(range_starts.begin(), range_starts.end());
  range_starts.erase(std::unique(range_starts.begin(), range_starts.end()), range_starts.end());
  return range_starts;
}

std::vector<int32_t> step(const TextAutomaton& automaton, const std::vector<int32_t>& states,
                          char32_t c) {
  std::vector<int32_t> next;
  for (const int32_t state : states)
    for (const TextAutomaton::Edge& edge : automaton.states[state].edges)
      if (contains(edge.set, c)) next.push_back(edge.to);
  std::sort(next.begin(), next.end());
  next.erase(std::unique(next.begin(), next.end()), next.end());
  return next;
}

bool accept(const TextAutomaton& automaton, const std::vector<int32_t>& states) {
  return std::any_of(states.begin(), states.end(),
                     [&](int32_t state) { return automaton.states[state].accepts; });
}

}  // namespace

TextAutomaton every_text() {
  return {.states = {{.edges = {{kAnyCharacter, 0}}, .accepts = true}}};
}

TextAutomaton texts_in(const std::vector<std::string>& texts) {
  TextAutomaton automaton;
  std::map<std::pair<int32_t, char32_t>, int32_t> next;
  for (const std::string& text : texts) {
    int32_t at = 0;
    for (const char32_t c : characters_of(text)) {
      const auto end = static_cast<int32_t>(automaton.states.size());
      const auto [it, is_new] = next.try_emplace({at, c}, end);
      if (is_new) {
        require(automaton.states.size() < kMaxTextStates, "too large: its strings are too long");
        automaton.states.push_back({});
        automaton.states[at].edges.push_back({{{c, c}}, end});
      }
      at = it->second;
    }
    automaton.states[at].accepts = true;
  }
  return automaton;
}

TextAutomaton union_of(const TextAutomaton& a, const TextAutomaton& b) {
  TextAutomaton both;
  const auto add = [&](const TextAutomaton& from) {
    const auto first = static_cast<int32_t>(both.states.size());
    require(first + from.states.size() < kMaxTextStates, "too large");
    for (TextAutomaton::State state : from.states) {
      for (TextAutomaton::Edge& edge : state.edges) edge.to += first;
      both.states.push_back(std::move(state));
    }
    const TextAutomaton::State start = both.states[first];
    auto& edges = both.states[0].edges;
    edges.insert(edges.end(), start.edges.begin(), start.edges.end());
    both.states[0].accepts = both.states[0].accepts || start.accepts;
  };
  add(a);
  add(b);
  return both;
}

TextAutomaton intersection(const TextAutomaton& a, const TextAutomaton& b) {
  AutomatonBuilder<std::pair<int32_t, int32_t>> found({0, 0});
  for (size_t i = 0; found.has(i); ++i) {
    const auto [of_a, of_b] = found.key(i);
    found.automaton.states[i].accepts = a.states[of_a].accepts && b.states[of_b].accepts;
    for (const TextAutomaton::Edge& x : a.states[of_a].edges)
      for (const TextAutomaton::Edge& y : b.states[of_b].edges)
        found.edge(i, intersection(x.set, y.set), {x.to, y.to});
  }
  return std::move(found.automaton);
}

TextAutomaton complement(const TextAutomaton& automaton) {
  AutomatonBuilder<std::vector<int32_t>> found({0});
  size_t n_steps = 0;
  for (size_t i = 0; found.has(i); ++i) {
    const std::vector<int32_t> states = found.key(i);
    found.automaton.states[i].accepts = !accept(automaton, states);
    const std::vector<char32_t> first = range_starts(automaton, states);
    n_steps += first.size() * (states.size() + 1);
    require(n_steps <= kMaxComplementSteps, "too large to be excluded: too many different strings");
    std::map<std::vector<int32_t>, CharacterSet> next;
    for (size_t k = 0; k < first.size(); ++k) {
      const char32_t end = k + 1 < first.size() ? first[k + 1] : kAnyCharacter.back().last + 1;
      if (first[k] < end) next[step(automaton, states, first[k])].push_back({first[k], end - 1});
    }
    for (auto& [to, set] : next) found.edge(i, normalised(std::move(set)), to);
  }
  return std::move(found.automaton);
}

TextAutomaton with_length(const TextAutomaton& automaton, int min, int max) {
  constexpr size_t kEnough = 2'500;
  AutomatonBuilder<std::pair<int32_t, int>> found({0, 0});
  for (size_t i = 0; found.has(i); ++i) {
    const auto [state, n] = found.key(i);
    found.automaton.states[i].accepts = automaton.states[state].accepts && n >= min;
    const bool full = n == max || (max != kNoLimit && n >= min && i > kEnough);
    if (full) continue;
    const int next = max == kNoLimit ? std::min(n + 1, min) : n + 1;
    for (const TextAutomaton::Edge& edge : automaton.states[state].edges)
      found.edge(i, edge.set, {edge.to, next});
  }
  return std::move(found.automaton);
}

bool matches(const TextAutomaton& automaton, const std::string& text) {
  std::vector<int32_t> states = {0};
  for (const char32_t c : characters_of(text)) states = step(automaton, states, c);
  return accept(automaton, states);
}

void add_automaton(Grammar& g, Grammar::Node from, Grammar::Node to, const TextAutomaton& automaton,
                   Escaping escaping) {
  std::vector<Grammar::Node> nodes;
  for (const TextAutomaton::State& state : automaton.states) {
    nodes.push_back(g.add_node());
    if (state.accepts) g.add_epsilon(nodes.back(), to);
  }
  CharacterWriter writer(g, escaping);
  for (size_t i = 0; i < nodes.size(); ++i)
    for (const TextAutomaton::Edge& edge : automaton.states[i].edges)
      writer.write(nodes[i], nodes[edge.to], edge.set);
  g.add_epsilon(from, nodes[0]);
}

}  // namespace tandem
