// Runs requests to their end, several at a time: prompts in chunks, then one token a step each, all
// in one batch.
#pragma once
#include <functional>
#include <span>
#include <vector>

#include "engine/deepseek.h"
#include "engine/request.h"
#include "engine/token_chooser.h"

namespace tandem {

struct Completion {
  std::vector<int32_t> tokens;
  FinishReason finish = FinishReason::kLength;
  int cached_tokens = 0;       // of the prompt, taken from the KvSequence
  double prefill_seconds = 0;  // from the start of its first step to its first token
  double decode_seconds = 0;   // from its first token to its last
};

struct GeneratorHooks {
  // A token of request i; return false to end that request (it then counts as stopped).
  std::function<bool(int i, const Sampled&)> on_token;
  std::function<bool()> cancelled;                              // asked before every step
  std::function<void(int64_t done, int64_t total)> on_prefill;  // tokens of all prompts
};

class Generator {
 public:
  // `vocabulary` may be smaller than the model's: the rest is padding.
  Generator(DeepSeek& model, KvCache& cache, Vocabulary vocabulary, int64_t context);

  // Throws Error, before anything is computed, for a request that can never run: empty, longer than
  // the context, a token that the model does not have, parameters out of range.
  std::vector<Completion> run(std::span<const Request> requests, const GeneratorHooks& hooks);

 private:
  struct Running;
  struct Step;
  int64_t admit(std::span<const Request> requests, size_t& next, std::vector<Running>& running);
  void fill(Step& step, std::vector<Running>& running) const;
  void take_token(Running& r, size_t logits_row, const GeneratorHooks& hooks);
  void retire(bool cancelled, std::vector<Running>& running, std::vector<Completion>& completions);

  DeepSeek& model_;
  KvCache& cache_;
  const Vocabulary vocabulary_;
  const int64_t context_;
  TokenChooser chooser_;
};

}  // namespace tandem
