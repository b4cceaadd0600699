// Which tokens a grammar allows in a state. The tokens allowed at a node are computed once and
// cached for all states and texts; a rule's callers are examined only for tokens that extend beyond
// the end of the rule.
#pragma once
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "text/grammar/text_states.h"
#include "text/tokenizer.h"

namespace tandem {

// A trie of the bytes of all tokens of a vocabulary, to find the tokens that a grammar allows
// without checking each one separately. Immutable.
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

// Thread-safe.
class GrammarTokens {
 public:
  // The nodes of `base`, if it is not null, are the first nodes of `grammar`, and they call only
  // each other; their cached tokens are shared. The trie must outlive this object.
  GrammarTokens(Grammar grammar, const TokenTrie& trie,
                std::shared_ptr<const GrammarTokens> base = nullptr);

  const Grammar& grammar() const { return grammar_; }
  int32_t vocab_size() const { return trie_.vocab_size(); }

  // Sets the bits of the tokens that are allowed in `state`. `states` belongs to this grammar.
  void add_allowed(TextStates& states, TextStates::State state, std::span<uint64_t> bits) const;

 private:
  // Tokens that a node allows without regard to the callers of its rule.
  struct NodeTokens {
    std::vector<int32_t> ids;    // ids, if there are few ..
    std::vector<uint64_t> bits;  // .. or else a mask
    std::vector<int32_t> exits;  // trie nodes where the rule may have ended but tokens continue
  };

  const NodeTokens& tokens_at(Grammar::Node node) const;
  std::unique_ptr<const NodeTokens> compute_tokens(Grammar::Node node) const;

  const Grammar grammar_;
  const TokenTrie& trie_;
  const std::shared_ptr<const GrammarTokens> base_;
  mutable std::mutex mutex_;                                      // guards cache_
  mutable std::vector<std::unique_ptr<const NodeTokens>> cache_;  // [node]
};

inline size_t mask_words(int32_t vocab_size) { return (static_cast<size_t>(vocab_size) + 63) / 64; }

}  // namespace tandem
