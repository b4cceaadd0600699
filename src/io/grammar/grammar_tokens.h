// Which tokens a grammar takes in a state. What depends on a node alone is found once for all
// states and texts and kept; only where a token goes on beyond the end of a rule, its callers are
// looked at.
#pragma once
#include <memory>
#include <mutex>
#include <vector>

#include "io/grammar/text_states.h"
#include "io/grammar/token_trie.h"

namespace tandem {

// Thread-safe.
class GrammarTokens {
 public:
  // `base`, if there is one, has the same nodes as the first of this grammar, which call only each
  // other: what is known of them is shared. The trie outlives this.
  GrammarTokens(Grammar grammar, const TokenTrie& trie,
                std::shared_ptr<const GrammarTokens> base = nullptr);

  const Grammar& grammar() const { return grammar_; }
  int32_t vocab_size() const { return trie_.vocab_size(); }

  // Sets the bits of the tokens that may come in `state` of a text in this grammar.
  void add_allowed(TextStates& states, TextStates::State state, std::span<uint64_t> bits) const;

 private:
  // Tokens that begin at a node and end before its rule's end, or there.
  struct NodeTokens {
    std::vector<int32_t> few;    // when there are few ..
    std::vector<uint64_t> bits;  // .. or else
    std::vector<int32_t> exits;  // nodes of the trie where the rule may have ended and tokens go on
  };

  const NodeTokens& tokens_at(Grammar::Node node) const;
  std::unique_ptr<const NodeTokens> find_tokens(Grammar::Node node) const;

  const Grammar grammar_;
  const TokenTrie& trie_;
  const std::shared_ptr<const GrammarTokens> base_;
  mutable std::mutex mutex_;                                      // of what follows
  mutable std::vector<std::unique_ptr<const NodeTokens>> known_;  // [node]
};

inline size_t mask_words(int32_t vocab_size) { return (static_cast<size_t>(vocab_size) + 63) / 64; }

}  // namespace tandem
