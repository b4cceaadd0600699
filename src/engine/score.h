// Logits of given tokens, position by position: for `logits`, `eval` and tests.
#pragma once
#include <functional>
#include <span>

#include "engine/deepseek.h"

namespace tandem {

// Calls row(i, logits [vocab]) for every i in [first_row, tokens.size()), in order. The tokens form
// one sequence from position 0. Throws Error when they are empty, not in the vocabulary or more
// than the cache holds.
void score(DeepSeek& model, KvCache& cache, std::span<const int32_t> tokens, int64_t first_row,
           const std::function<void(int64_t i, std::span<const float> logits)>& row);

}  // namespace tandem
