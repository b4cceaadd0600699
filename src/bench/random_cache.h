// A KV cache with random contents, as if after a long prompt.
#pragma once
#include <random>
#include <span>
#include <vector>

#include "engine/kv_cache.h"
#include "model/batch.h"

namespace tandem {

std::vector<int32_t> random_tokens(int n, int vocab, std::mt19937& rng);
std::vector<int32_t> first_pages(int n);  // pages 0 to n - 1

// Sequences of which the last `n` of `context` tokens are computed, all with token id 0. Pages are
// divided equally.
struct LastTokens {
  LastTokens(int context, int n, std::span<const int32_t> pages, int n_sequences = 1)
      : tokens(n_sequences * n, 0), positions(tokens.size()) {
    const size_t own = pages.size() / n_sequences;
    for (int s = 0; s < n_sequences; ++s) {
      for (int i = 0; i < n; ++i) positions[s * n + i] = context - n + i;
      sequences.push_back({s * n, n, context, pages.subspan(s * own, own)});
    }
  }
  Batch batch() const { return {tokens, positions, sequences, {}}; }

  std::vector<int32_t> tokens, positions;
  std::vector<Sequence> sequences;
};

// Fills every page with numbers between -1 and 1.
void fill_with_random(const KvCache& cache, const ModelConfig& config);

}  // namespace tandem
