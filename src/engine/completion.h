// Requests run to their end on the calling thread, by an engine that no other thread turns.
#pragma once
#include <functional>
#include <span>
#include <vector>

#include "engine/engine.h"

namespace tandem {

struct Completion {
  std::vector<int32_t> tokens;
  FinishReason finish = FinishReason::kCancelled;
  int cached_tokens = 0;       // of the prompt, from the prefix cache
  double prefill_seconds = 0;  // from the start of its first step to its first token
  double decode_seconds = 0;   // from its first token to its last
};

struct CompletionHooks {
  // A token of request i; return false to end that request, which then counts as stopped.
  std::function<bool(int i, const TokenEvent&)> on_token;
  std::function<bool()> cancelled;                              // asked before every step
  std::function<void(int64_t done, int64_t total)> on_prefill;  // tokens of all prompts
};

// Throws Error, before anything is computed, for a request that can never run, and when one fails.
std::vector<Completion> complete(Engine& engine, std::span<const Request> requests,
                                 const CompletionHooks& hooks = {});

// Calls row(i, logits [vocab]) for every i in [first_row, tokens.size()), in order. The tokens form
// one sequence from position 0. Throws Error when they are empty, not in the vocabulary or more
// than the engine's context.
void score(Engine& engine, std::span<const int32_t> tokens, int64_t first_row,
           const std::function<void(int64_t i, std::span<const float> logits)>& row);

// Computes tokens that no request asked for, for about a second at most, so that the first request
// takes no longer than the next: memory is touched, threads have work, a GPU has its kernels. It is
// an engine of its own that does so: nothing of it is counted or found later. Throws what step()
// throws.
void warm_up(StepRunner& model, KvCache& cache, const Vocabulary& vocabulary, int64_t context);

}  // namespace tandem
