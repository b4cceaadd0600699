#include "text/grammar/pattern_grammar.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/check.h"
#include "io/json.h"
#include "text/utf8.h"

namespace tandem {
namespace {

constexpr int kMaxRepeats = 10'000;
constexpr int kMaxDepth = 64;
constexpr size_t kMaxEpsilonSteps = 2'000'000;

const CharacterSet kDigits = {{'0', '9'}};
const CharacterSet kWord = {{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}};
const CharacterSet kSpace = {{'\t', '\r'},     {' ', ' '},       {0xA0, 0xA0},     {0x1680, 0x1680},
                             {0x2000, 0x200A}, {0x2028, 0x2029}, {0x202F, 0x202F}, {0x205F, 0x205F},
                             {0x3000, 0x3000}, {0xFEFF, 0xFEFF}};
const CharacterSet kLineEnds = {{'\n', '\n'}, {'\r', '\r'}, {0x2028, 0x2029}};

// A quantified part of an expression: alternatives of sequences, or a set of characters.
struct Term {
  CharacterSet set;
  std::vector<std::vector<Term>> alternatives;  // sequences of a group; empty for a set
  int min = 1, max = 1;                         // kMaxRepeats + 1: unlimited
};

class PatternParser {
 public:
  explicit PatternParser(std::string_view pattern) : text_(characters_of(pattern)) {}

  struct Alternative;
  struct Lookahead {
    std::vector<Alternative> alternatives;
    bool is_negative;  // true for "(?!", false for "(?="
  };
  struct Alternative {
    std::vector<Lookahead> lookaheads;  // lookaheads after "^"
    std::vector<Term> parts;
    bool anchored_begin = false, anchored_end = false;  // "^" and "$"
  };
  std::vector<Alternative> parse() {
    std::vector<Alternative> all = alternatives(0);
    require(done(), "{} is not supported here", shown_here());
    return all;
  }

 private:
  std::vector<Alternative> alternatives(int depth) {
    require(depth < kMaxDepth, "groups are nested deeper than {} levels", kMaxDepth);
    std::vector<Alternative> all;
    do {
      Alternative a;
      while (take('^')) a.anchored_begin = true;
      while (a.anchored_begin && (starts_with("(?=") || starts_with("(?!"))) {
        const bool is_negative = text_[at_ + 2] == '!';
        at_ += 3;
        a.lookaheads.push_back({alternatives(depth + 1), is_negative});
        require(take(')'), "a group is not closed, or contains an anchor");
      }
      a.parts = sequence(depth);
      while (take('$')) a.anchored_end = true;
      all.push_back(std::move(a));
    } while (take('|'));
    return all;
  }

  bool starts_with(std::string_view with) const {
    return std::equal(with.begin(), with.end(), text_.begin() + static_cast<ptrdiff_t>(at_),
                      text_.begin() + static_cast<ptrdiff_t>(std::min(text_.size(), at_ + 3)));
  }
  bool done() const { return at_ == text_.size(); }
  char32_t peek() const { return done() ? 0 : text_[at_]; }
  bool take(char32_t c) {
    if (done() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  char32_t next() {
    require(!done(), "the pattern is incomplete");
    return text_[at_++];
  }
  std::string shown_here() const {
    std::string rest;
    for (size_t i = at_; i < text_.size() && i < at_ + 8; ++i) append_utf8(rest, text_[i]);
    return shown(rest);
  }

  std::vector<Term> sequence(int depth) {
    require(depth < kMaxDepth, "groups are nested deeper than {} levels", kMaxDepth);
    std::vector<Term> parts;
    while (!done() && peek() != '|' && peek() != ')' && peek() != '$') {
      Term part = atom(depth);
      quantify(part);
      parts.push_back(std::move(part));
    }
    return parts;
  }

  Term atom(int depth) {
    Term part;
    const size_t begin = at_;
    const char32_t c = next();
    switch (c) {
      case '(':
        if (take('?')) {
          require(take(':'),
                  "groups of the form (?.. other than (?: are not supported, and (?= and (?! only "
                  "after ^");
        }
        do part.alternatives.push_back(sequence(depth + 1));
        while (take('|'));
        require(take(')'), "a group is not closed, or contains an anchor");
        return part;
      case '[':
        part.set = character_class();
        return part;
      case '.':
        part.set = inverted(kLineEnds);
        return part;
      case '\\':
        part.set = escape(false);
        return part;
      case '*':
      case '+':
      case '?':
      case '^':
        at_ = begin;
        fail("{} is not supported here", shown_here());
      default:
        part.set = {{c, c}};
        return part;
    }
  }

  void quantify(Term& part) {
    if (take('*')) {
      part.min = 0;
      part.max = kMaxRepeats + 1;
    } else if (take('+')) {
      part.max = kMaxRepeats + 1;
    } else if (take('?')) {
      part.min = 0;
    } else if (peek() == '{') {
      const size_t begin = at_++;
      const int min = number();
      part.min = part.max = min;
      if (take(',')) part.max = peek() == '}' ? kMaxRepeats + 1 : number();
      const bool ok = min >= 0 && part.max >= part.min && take('}');
      if (!ok) at_ = begin;
      require(ok, "{} is not a count between 0 and {}", shown_here(), kMaxRepeats);
    } else {
      return;
    }
    take('?');  // a lazy quantifier matches the same texts
    require(peek() != '*' && peek() != '+' && peek() != '{' && peek() != '?',
            "{} is not supported here", shown_here());
  }

  int number() {
    int value = -1;
    while (!done() && peek() >= '0' && peek() <= '9') {
      value = std::max(value, 0) * 10 + static_cast<int>(next() - '0');
      if (value > kMaxRepeats) return -1;
    }
    return value;
  }

  CharacterSet character_class() {
    const bool is_negated = take('^');
    CharacterSet set;
    while (!take(']')) {
      CharacterSet one = class_item();
      const bool is_range = peek() == '-' && at_ + 1 < text_.size() && text_[at_ + 1] != ']';
      if (is_range) {
        ++at_;
        const CharacterSet end = class_item();
        require(one.size() == 1 && end.size() == 1 && one[0].first == one[0].last &&
                    end[0].first == end[0].last && one[0].first <= end[0].first,
                "a character range is invalid before {}", shown_here());
        one[0].last = end[0].last;
      }
      set.insert(set.end(), one.begin(), one.end());
    }
    return is_negated ? inverted(set) : normalised(std::move(set));
  }

  CharacterSet class_item() {
    const char32_t c = next();
    return c == '\\' ? escape(true) : CharacterSet{{c, c}};
  }

  CharacterSet escape(bool in_class) {
    const size_t begin = at_ - 1;
    const char32_t c = next();
    const auto one = [](char32_t character) { return CharacterSet{{character, character}}; };
    switch (c) {
      case 'd':
        return kDigits;
      case 'D':
        return inverted(kDigits);
      case 'w':
        return kWord;
      case 'W':
        return inverted(kWord);
      case 's':
        return kSpace;
      case 'S':
        return inverted(kSpace);
      case 't':
        return one('\t');
      case 'n':
        return one('\n');
      case 'r':
        return one('\r');
      case 'f':
        return one('\f');
      case 'v':
        return one('\v');
      case 'x':
        return one(hex(2));
      case 'u':
        return one(hex(4));
      case 'b':
        if (in_class) return one('\b');
        break;
      default:
        break;
    }
    const bool is_letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    if (!is_letter && !(c >= '0' && c <= '9')) return one(c);
    at_ = begin;
    fail("{} is not supported", shown_here());
  }

  char32_t hex(int n) {
    char32_t value = 0;
    for (int i = 0; i < n; ++i) {
      const char32_t c = next();
      const bool digit = c >= '0' && c <= '9';
      const char32_t letter = c | 0x20;
      require(digit || (letter >= 'a' && letter <= 'f'), "an escape needs {} hexadecimal digits",
              n);
      value = value * 16 + (digit ? c - '0' : letter - 'a' + 10);
    }
    require(value < 0xD800 || value > 0xDFFF, "surrogates are not supported: write the character");
    return value;
  }

  const std::u32string text_;
  size_t at_ = 0;
};

// A nondeterministic automaton with epsilon edges, built directly from an expression.
class Nfa {
 public:
  int32_t add_state() {
    require(states_.size() < kMaxTextEdges, "too large: more than {} states", kMaxTextEdges);
    states_.push_back({});
    return static_cast<int32_t>(states_.size()) - 1;
  }
  void add_epsilon(int32_t from, int32_t to) { states_[from].epsilons.push_back(to); }
  void add_edge(int32_t from, const CharacterSet& set, int32_t to) {
    states_[from].edges.push_back({set, to});
  }

  int32_t add_any_text(int32_t from) {
    const int32_t loop = add_state();
    add_epsilon(from, loop);
    add_edge(loop, kAnyCharacter, loop);
    return loop;
  }

  int32_t add_sequence(int32_t from, const std::vector<Term>& parts) {
    for (const Term& part : parts) from = add_repeated(from, part);
    return from;
  }

  TextAutomaton without_epsilons(int32_t start, int32_t end) const {
    TextAutomaton automaton;
    std::vector<int32_t> ids(states_.size(), -1), found = {start};
    ids[start] = 0;
    std::vector<int32_t> seen_from(states_.size(), -1);
    size_t n_edges = 0, n_reached = 0;
    for (size_t i = 0; i < found.size(); ++i) {
      const std::vector<int32_t> reached = closure(found[i], seen_from);
      n_reached += reached.size();
      require(n_reached <= kMaxEpsilonSteps, "too large: too many optional parts");
      for (const int32_t state : reached) {
        auto& to = automaton.states[i];
        to.accepts = to.accepts || state == end;
        for (const TextAutomaton::Edge& edge : states_[state].edges) {
          require(++n_edges <= kMaxTextEdges, "too large: more than {} edges", kMaxTextEdges);
          if (ids[edge.to] < 0) {
            ids[edge.to] = static_cast<int32_t>(found.size());
            found.push_back(edge.to);
          }
          to.edges.push_back({edge.set, ids[edge.to]});
        }
      }
      automaton.states.resize(found.size());
    }
    return automaton;
  }

 private:
  struct State {
    std::vector<TextAutomaton::Edge> edges;
    std::vector<int32_t> epsilons;
  };

  // The states reachable from a state without reading. `seen_from` marks each state with the last
  // `from` that reached it.
  std::vector<int32_t> closure(int32_t from, std::vector<int32_t>& seen_from) const {
    std::vector<int32_t> reached = {from};
    seen_from[from] = from;
    for (size_t i = 0; i < reached.size(); ++i)
      for (const int32_t to : states_[reached[i]].epsilons)
        if (std::exchange(seen_from[to], from) != from) reached.push_back(to);
    return reached;
  }

  int32_t add_repeated(int32_t from, const Term& part) {
    for (int i = 0; i < part.min; ++i) from = add_once(from, part);
    const int32_t end = add_state();
    if (part.max > kMaxRepeats) {
      const int32_t loop = add_state();
      add_epsilon(from, loop);
      add_epsilon(add_once(loop, part), loop);
      add_epsilon(loop, end);
      return end;
    }
    for (int i = part.min; i < part.max; ++i) {
      add_epsilon(from, end);
      from = add_once(from, part);
    }
    add_epsilon(from, end);
    return end;
  }

  int32_t add_once(int32_t from, const Term& part) {
    const int32_t to = add_state();
    if (part.alternatives.empty()) add_edge(from, part.set, to);
    for (const auto& alternative : part.alternatives) {
      const int32_t begin = add_state();
      add_epsilon(from, begin);
      add_epsilon(add_sequence(begin, alternative), to);
    }
    return to;
  }

  std::vector<State> states_;
};

TextAutomaton automaton_of(const std::vector<PatternParser::Alternative>& alternatives,
                           bool full_match);

TextAutomaton automaton_of(const PatternParser::Alternative& alternative, bool full_match) {
  Nfa nfa;
  const int32_t start = nfa.add_state();
  int32_t state = start;
  if (!full_match && !alternative.anchored_begin) state = nfa.add_any_text(state);
  state = nfa.add_sequence(state, alternative.parts);
  if (!full_match && !alternative.anchored_end) state = nfa.add_any_text(state);
  TextAutomaton texts = nfa.without_epsilons(start, state);
  for (const PatternParser::Lookahead& lookaheads : alternative.lookaheads) {
    std::vector<PatternParser::Alternative> from_here = lookaheads.alternatives;
    for (PatternParser::Alternative& a : from_here) a.anchored_begin = true;
    const TextAutomaton seen = automaton_of(from_here, false);
    texts = intersection(texts, lookaheads.is_negative ? complement(seen) : seen);
  }
  return texts;
}

TextAutomaton automaton_of(const std::vector<PatternParser::Alternative>& alternatives,
                           bool full_match) {
  TextAutomaton all = automaton_of(alternatives.front(), full_match);
  for (size_t i = 1; i < alternatives.size(); ++i)
    all = union_of(all, automaton_of(alternatives[i], full_match));
  return all;
}

}  // namespace

TextAutomaton pattern_automaton(std::string_view pattern, bool full_match) {
  return automaton_of(PatternParser(pattern).parse(), full_match);
}

void add_pattern(Grammar& g, Grammar::Node from, Grammar::Node to, std::string_view pattern,
                 Escaping escaping) {
  add_automaton(g, from, to, pattern_automaton(pattern, true), escaping);
}

}  // namespace tandem
