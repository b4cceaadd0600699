// A trie of the bytes of all tokens of a vocabulary, to find the tokens that a grammar allows
// without checking each one separately. Immutable.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "text/tokenizer.h"

namespace tandem {

class TokenTrie {
 public:
  // Added tokens are omitted: inside a text, a string such as "</think>" is written with other
  // tokens.
  explicit TokenTrie(const Tokenizer& tokenizer);

  // Nodes are in depth-first order: the first child of node i is i + 1, if that is less than `end`.
  struct Node {
    int32_t end;          // index after the last descendant
    int32_t first_token;  // index of the first token that ends here, up to the next node's
    uint16_t depth;       // number of bytes read; 0 for the root
    uint8_t byte;
  };
  static constexpr int32_t kRoot = 0;
  const Node& node(int32_t i) const { return nodes_[i]; }
  std::span<const int32_t> tokens(int32_t i) const;
  int32_t vocab_size() const { return vocab_size_; }

 private:
  int32_t vocab_size_;
  std::vector<Node> nodes_;  // followed by a sentinel
  std::vector<int32_t> tokens_;
};

}  // namespace tandem
