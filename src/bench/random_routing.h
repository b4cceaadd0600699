// Random routing of the tokens of a step, for measurements of MoE layers.
#pragma once
#include <random>
#include <vector>

#include "model/batch.h"
#include "model/config.h"

namespace tandem {

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
