// Random inputs of a step: tokens, a KV cache as if after a long prompt, and the choice of experts.
#pragma once
#include <random>
#include <span>
#include <vector>

#include "model/batch.h"
#include "model/config.h"
#include "scheduling/kv_cache.h"

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

// Routing of one step. With skew, expert 0 is chosen by every second token only; else uniform.
class RandomRouting {
 public:
  RandomRouting(const RouterConfig& router, int n_tokens, bool skew, std::mt19937& rng);
  // Views this object's data; valid while it exists and is not moved.
  Routing routing() const;

 private:
  int n_active_;
  mutable std::vector<int32_t> ids_;  // [tokens, n_active]
  mutable std::vector<float> weights_;
};

// Several routings of equal cost: all use the median number of distinct experts of random routings.
std::vector<RandomRouting> routings_of_equal_cost(const RouterConfig& router, int n_tokens,
                                                  bool skew, std::mt19937& rng);

// Expected number of distinct experts that `n_tokens` tokens choose under uniform routing.
double expected_experts(const RouterConfig& router, int64_t n_tokens);

// The number of tokens of ids [tokens, n_active] per expert.
std::vector<int> rows_of_experts(const RouterConfig& router, const TensorView& ids);

}  // namespace tandem
