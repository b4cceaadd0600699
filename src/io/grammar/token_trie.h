// All tokens of a vocabulary by their bytes, those with a common beginning together, to find the
// ones that a grammar takes without reading each by itself. Immutable.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "io/tokenizer.h"

namespace tandem {

class TokenTrie {
 public:
  // Added tokens stand for themselves and are left out: what looks like "</think>" in a text is
  // written with others.
  explicit TokenTrie(const Tokenizer& tokenizer);

  // In depth-first order: the first child of node i is i + 1, if it is before `end`.
  struct Node {
    int32_t end;          // after the last one that is below this
    int32_t first_token;  // of those that end here; theirs are before the next node's
    uint16_t depth;       // bytes read; the root has none
    uint8_t byte;
  };
  static constexpr int32_t kRoot = 0;
  const Node& node(int32_t i) const { return nodes_[i]; }
  std::span<const int32_t> tokens(int32_t i) const;
  int32_t vocab_size() const { return vocab_size_; }

 private:
  int32_t vocab_size_;
  std::vector<Node> nodes_;  // one more than there are
  std::vector<int32_t> tokens_;
};

}  // namespace tandem
