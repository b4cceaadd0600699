#include "text/tokenizer_splits.h"

#include "text/utf8.h"

namespace tandem {
namespace {

std::vector<SplitPattern> patterns_of(const std::vector<SplitRule>& rules) {
  std::vector<SplitPattern> patterns;
  for (const SplitRule& rule : rules) patterns.push_back(parse_oniguruma(rule.pattern));
  return patterns;
}

}  // namespace

PreTokenizer::PreTokenizer(const std::vector<SplitRule>& rules)
    : PreTokenizer(rules, patterns_of(rules)) {}

PreTokenizer::PreTokenizer(const std::vector<SplitRule>& rules,
                           const std::vector<SplitPattern>& patterns)
    : symbols_(patterns) {
  for (size_t i = 0; i < rules.size(); ++i)
    rules_.push_back({Regex(patterns[i], symbols_), rules[i].remove_matches});
}

// State of one split(). Pieces are ranges of symbols and arrive from left to right.
struct PreTokenizer::SplitState {
  std::string_view text;
  const char* symbols;  // the symbols of `text`
  const Sink& sink;
  std::vector<RegexMatcher> matchers = {};
  size_t n_symbols = 0, n_bytes = 0;  // position of the end of the last piece

  void emit(std::string_view piece) {
    const auto begin = static_cast<size_t>(piece.data() - symbols);
    const size_t from = skip_code_points(text, n_bytes, begin - n_symbols);
    n_bytes = skip_code_points(text, from, piece.size());
    n_symbols = begin + piece.size();
    sink(text.substr(from, n_bytes - from));
  }
};

void PreTokenizer::split(std::string_view text, const Sink& sink) const {
  const std::string symbols = symbols_.symbols_of(text);
  SplitState state{text, symbols.data(), sink};
  for (const Rule& rule : rules_) state.matchers.emplace_back(rule.regex);
  split_from(0, symbols, state);
}

void PreTokenizer::split_from(size_t rule, std::string_view piece, SplitState& state) const {
  if (piece.empty()) return;
  if (rule == rules_.size()) return state.emit(piece);
  size_t gap = 0, start = 0;
  while (start <= piece.size()) {
    const Match match = state.matchers[rule].find(piece, start);
    if (match.begin == std::string_view::npos) break;
    split_from(rule + 1, piece.substr(gap, match.begin - gap), state);
    if (!rules_[rule].remove_matches)
      split_from(rule + 1, piece.substr(match.begin, match.end - match.begin), state);
    gap = start = match.end;
    if (match.begin == match.end) ++start;  // an empty match splits; search one symbol later
  }
  split_from(rule + 1, piece.substr(gap), state);
}

}  // namespace tandem
