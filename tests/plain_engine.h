// The engine for tests of other parts: logits of given tokens, and a simple reference for the
// engine's loop.
#pragma once
#include "engine/completion.h"

namespace tandem::test {

Engine plain_engine(StepRunner& model, KvCache& cache);

void score(StepRunner& model, KvCache& cache, std::span<const int32_t> tokens, int64_t first_row,
           const std::function<void(int64_t i, std::span<const float> logits)>& row);

// Generates the answer to one request without scheduler, prefix cache and other sequences: pages in
// order, the prompt in one or more chunks, one token a step, no stop ids.
std::vector<int32_t> generated_alone(StepRunner& model, KvCache& cache,
                                     const Vocabulary& vocabulary, const Request& request,
                                     int64_t context);

}  // namespace tandem::test
