// Which experts the tokens of a step go to, drawn at random, to measure MoE layers.
#pragma once
#include <random>
#include <vector>

#include "model/batch.h"
#include "model/config.h"

namespace tandem {

// Routing of one step. In a skewed one expert 0 is taken by every other token and by no one else.
class RandomRouting {
 public:
  RandomRouting(const RouterConfig& router, int n_tokens, bool skew, std::mt19937& rng);
  // Of this object, wherever it was moved to.
  Routing routing() const;

 private:
  int n_active_;
  mutable std::vector<int32_t> ids_;  // [tokens, n_active]
  mutable std::vector<float> weights_;
};

// Some routings of equal cost: as many different experts as half of all random ones have.
std::vector<RandomRouting> routings_of_equal_cost(const RouterConfig& router, int n_tokens,
                                                  bool skew, std::mt19937& rng);

// How many different experts `n_tokens` tokens are expected to choose when all are alike.
double expected_experts(const RouterConfig& router, int64_t n_tokens);

// How many of the tokens of ids [tokens, n_active] go to each expert.
std::vector<int> rows_of_experts(const RouterConfig& router, const TensorView& ids);

}  // namespace tandem
