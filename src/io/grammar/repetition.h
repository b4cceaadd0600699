// Something between a least and a greatest number of times, such as the characters of a text:
// counted in blocks that all counts share, so that 10,000 take hardly more of a grammar than 100.
#pragma once
#include <array>
#include <functional>

#include "io/grammar/grammar.h"

namespace tandem {

inline constexpr int kNoLimit = -1;

class Repetition {
 public:
  // Adds what is between two nodes, anew at each call. `one` is repeated, `close` ends it.
  using Between = std::function<void(Grammar::Node from, Grammar::Node to)>;
  Repetition(Grammar& grammar, const Between& one, const Between& close);

  // min to max times, kNoLimit: any number, and the close.
  void add(Grammar& grammar, Grammar::Node from, Grammar::Node to, int min, int max) const;

  static constexpr int kBlock = 32;

 private:
  std::array<Grammar::Rule, kBlock + 1> exactly_;  // [times], from 1
  std::array<Grammar::Rule, kBlock> at_most_;      // [times] .. and the close
  Grammar::Rule any_;
};

}  // namespace tandem
