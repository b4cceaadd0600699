// Pre-tokenisation: text to the pieces that byte-pair encoding never merges across.
#pragma once
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "io/tokenizer_regex.h"

namespace tandem {

struct SplitRule {
  std::string pattern;  // Oniguruma's syntax
  bool remove_matches =
      false;  // "Removed": the matches are dropped; else "Isolated": they are pieces
};

// Rules in order, each applied to every piece that the rules before it left: the matches become
// pieces (or vanish), the gaps between them stay pieces. Look-around sees the current piece only.
// Immutable and thread-safe.
class Splits {
 public:
  // Throws Error for a pattern that cannot be used.
  explicit Splits(const std::vector<SplitRule>& rules);

  using Sink = std::function<void(std::string_view piece)>;
  // Calls `sink` with the pieces of `text` (well-formed UTF-8) from left to right. Throws Error
  // when a pattern needs too much memory for this text.
  void split(std::string_view text, const Sink& sink) const;

 private:
  Splits(const std::vector<SplitRule>& rules, const std::vector<SplitPattern>& patterns);

  struct Rule {
    Regex regex;
    bool remove_matches;
  };
  struct Walk;
  void split_from(size_t rule, std::string_view piece, Walk& walk) const;

  SymbolTable symbols_;
  std::vector<Rule> rules_;
};

}  // namespace tandem
