#include "io/tokenizer_splits.h"

#include "io/utf8.h"

namespace tandem {

Splits::Splits(const std::vector<SplitRule>& rules) {
  for (const SplitRule& rule : rules) rules_.push_back({Regex(rule.pattern), rule.remove_matches});
}

void Splits::split(std::string_view text, const Sink& sink) const {
  std::vector<RegexMatcher> matchers;
  for (const Rule& rule : rules_) matchers.emplace_back(rule.regex);
  split_from(0, text, matchers, sink);
}

void Splits::split_from(size_t rule, std::string_view piece, std::vector<RegexMatcher>& matchers,
                        const Sink& sink) const {
  if (piece.empty()) return;
  if (rule == rules_.size()) {
    sink(piece);
    return;
  }
  size_t gap = 0, start = 0;
  while (start <= piece.size()) {
    const Match match = matchers[rule].find(piece, start);
    if (match.begin == std::string_view::npos) break;
    split_from(rule + 1, piece.substr(gap, match.begin - gap), matchers, sink);
    if (!rules_[rule].remove_matches)
      split_from(rule + 1, piece.substr(match.begin, match.end - match.begin), matchers, sink);
    gap = start = match.end;
    if (match.begin < match.end) continue;
    // An empty match cuts here; the next search starts one character on.
    start += match.end < piece.size() ? decode_utf8(piece, match.end).n_bytes : 1;
  }
  split_from(rule + 1, piece.substr(gap), matchers, sink);
}

}  // namespace tandem
