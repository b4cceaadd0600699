// A KV cache as after a long prompt, without computing one.
#pragma once
#include <span>
#include <vector>

#include "engine/kv_cache.h"
#include "model/batch.h"

namespace tandem {

// One sequence whose last `n` of `context` tokens are computed, all of them token 0.
struct LastTokens {
  LastTokens(int context, int n, std::span<const int32_t> pages)
      : tokens(n, 0), positions(n), sequence{0, n, context, pages} {
    for (int i = 0; i < n; ++i) positions[i] = context - n + i;
  }
  Batch batch() const { return {tokens, positions, {&sequence, 1}, {}}; }

  std::vector<int32_t> tokens, positions;
  Sequence sequence;
};

// Numbers between -1 and 1 in every page.
void fill_with_random(const KvCache& cache, const ModelConfig& config);

}  // namespace tandem
