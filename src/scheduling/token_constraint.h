// Restricts an answer to a grammar: computes which tokens may come next, as a mask for the sampler.
// There is one object per answer.
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
    bool after_thinking = false;      // the grammar starts after "</think>"; no end token before it
    std::vector<int32_t> end_tokens;  // allowed where the text may end
    int vocabulary = 0;               // logits of a row
  };

  // The tokenizer must outlive the object.
  TokenConstraint(std::shared_ptr<const GrammarTokens> tokens, const Tokenizer& tokenizer,
                  Options options);

  // A bit for each token that may come next, token 0 the lowest of the first word. Computed on the
  // first call after take(), which may take a millisecond; prepare() does that in advance.
  std::span<const uint64_t> allowed();
  void prepare() { allowed(); }
  // Takes the next token of the answer, an allowed one.
  void take(int32_t token);
  // Whether the text is complete and nothing may follow it.
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
  std::string thought_;                           // the last bytes of the reasoning text
  TextStates::State masked_ = TextStates::kDead;  // the state that mask_ belongs to
  std::vector<uint64_t> mask_;
};

}  // namespace tandem
