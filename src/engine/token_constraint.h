// Holds an answer to a grammar: which tokens may come next, as a mask for the sampler. One an
// answer.
#pragma once
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "text/grammar/grammar_tokens.h"

namespace tandem {

class TokenConstraint {
 public:
  struct Options {
    bool after_thinking = false;      // the grammar holds after "</think>"; no end before it
    std::vector<int32_t> end_tokens;  // may come where the text may end
    int vocabulary = 0;               // logits of a row
  };

  // The tokenizer outlives it.
  TokenConstraint(std::shared_ptr<const GrammarTokens> tokens, const Tokenizer& tokenizer,
                  Options options);

  // A bit for each token that may come next, token 0 the lowest of the first word. Found when it is
  // first asked for after take(), which may take a millisecond: prepare() does so before.
  std::span<const uint64_t> allowed();
  void prepare() { allowed(); }
  // The next token of the answer, an allowed one.
  void take(int32_t token);
  // The text is there and nothing may follow it.
  bool complete() const;

 private:
  void take_thought(int32_t token);
  void find_allowed();

  const std::shared_ptr<const GrammarTokens> tokens_;
  const Tokenizer& tokenizer_;
  const Options options_;
  TextStates states_;
  TextStates::State state_;
  bool thinking_;
  std::string thought_;                           // the last bytes of it
  TextStates::State masked_ = TextStates::kDead;  // the state that mask_ is of
  std::vector<uint64_t> mask_;
};

}  // namespace tandem
