// Runs requests to their end on the calling thread, with an engine that no other thread uses.
#pragma once
#include <functional>
#include <span>
#include <vector>

#include "engine/engine.h"

namespace tandem {

struct Completion {
  std::vector<int32_t> tokens;
  FinishReason finish = FinishReason::kCancelled;
  int cached_tokens = 0;  // prompt tokens found in the prefix cache
  int accepted_drafts = 0, rejected_drafts = 0;
  double prefill_seconds = 0;  // from the start of the request's first step to its first token
  double decode_seconds = 0;   // from the first token to the last
};

struct CompletionHooks {
  // Called for each token of request i; returning false ends the request with FinishReason::kStop.
  std::function<bool(int i, const TokenEvent&)> on_token;
  std::function<bool()> cancelled;                              // called before every step
  std::function<void(int64_t done, int64_t total)> on_prefill;  // tokens of all prompts
};

// Throws Error, before anything is computed, for a request that can never run, and later when a
// request fails.
std::vector<Completion> complete(Engine& engine, std::span<const Request> requests,
                                 const CompletionHooks& hooks = {});

// Calls row(i, logits [vocab]) for every i in [first_row, tokens.size()), in order. The tokens form
// one sequence from position 0. Throws Error when there are no tokens, one is not in the
// vocabulary, or there are more than the engine's context.
void score(Engine& engine, std::span<const int32_t> tokens, int64_t first_row,
           const std::function<void(int64_t i, std::span<const float> logits)>& row);

// Computes dummy tokens for about a second at most, so that the first request is not slower than
// later ones: memory is touched, threads are started, GPU kernels are loaded. Uses its own engine,
// so nothing is counted or left in the prefix cache. Throws what step() throws.
void warm_up(StepRunner& model, KvCache& cache, const Vocabulary& vocabulary, int64_t context);

}  // namespace tandem
