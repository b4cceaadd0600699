// Drafts tokens that may come next from the text so far: what followed the longest earlier
// occurrence of its end (prompt lookup decoding, Saxena 2023). One object per sequence.
#pragma once
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

namespace tandem {

class PromptLookup {
 public:
  // At most n tokens; none if no end of at least kShortest tokens has occurred before. `tokens` are
  // those of the last call and any number of new ones behind them.
  std::vector<int32_t> draft(std::span<const int32_t> tokens, int n);

 private:
  static constexpr int kShortest = 3;     // tokens of the end that must have occurred
  static constexpr int kOccurrences = 8;  // the newest ones are compared

  void index(std::span<const int32_t> tokens);

  // For the kShortest tokens that end at a position: the newest such position by their hash, and
  // for each position the one before it with the same hash; -1: none.
  std::unordered_map<uint64_t, int32_t> newest_;
  std::vector<int32_t> earlier_;
};

}  // namespace tandem
