// Pre-tokenisation: splits text into pieces; byte-pair encoding never merges across their
// boundaries.
#pragma once
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "text/tokenizer_regex.h"

namespace tandem {

struct SplitRule {
  std::string pattern;  // Oniguruma's syntax
  bool remove_matches =
      false;  // true: "Removed", matches are dropped; false: "Isolated", matches become pieces
};

// Applies rules in order, each to every piece that the previous rules produced: matches become
// pieces (or are dropped), and so do the gaps between them. Look-around is limited to the current
// piece. Immutable and thread-safe.
class PreTokenizer {
 public:
  // Throws Error for a pattern that cannot be used.
  explicit PreTokenizer(const std::vector<SplitRule>& rules);

  using Sink = std::function<void(std::string_view piece)>;
  // Calls `sink` with the pieces of `text` (well-formed UTF-8) from left to right. Throws Error
  // when a pattern needs too much memory for this text.
  void split(std::string_view text, const Sink& sink) const;

 private:
  PreTokenizer(const std::vector<SplitRule>& rules, const std::vector<SplitPattern>& patterns);

  struct Rule {
    Regex regex;
    bool remove_matches;
  };
  struct SplitState;
  void split_from(size_t rule, std::string_view piece, SplitState& state) const;

  SymbolTable symbols_;
  std::vector<Rule> rules_;
};

}  // namespace tandem
