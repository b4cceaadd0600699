// Repeats a part of a grammar `min` to `max` times, such as the characters of a string. Repetitions
// are counted in blocks that all counts share, so that 10,000 need few more nodes than 100.
#pragma once
#include <array>
#include <functional>

#include "text/grammar/grammar.h"

namespace tandem {

inline constexpr int kNoLimit = -1;

class Repetition {
 public:
  // Adds a part between two nodes, new at each call. `one` is repeated, `close` ends the
  // repetition.
  using AddPart = std::function<void(Grammar::Node from, Grammar::Node to)>;
  Repetition(Grammar& grammar, const AddPart& one, const AddPart& close);

  // Adds `min` to `max` repetitions (kNoLimit: no maximum) followed by `close`.
  void add(Grammar& grammar, Grammar::Node from, Grammar::Node to, int min, int max) const;

  static constexpr int kBlock = 32;

 private:
  std::array<Grammar::Rule, kBlock + 1> exactly_;  // [times], 1 .. kBlock
  std::array<Grammar::Rule, kBlock> at_most_;      // [times], followed by `close`
  Grammar::Rule any_;
};

}  // namespace tandem
