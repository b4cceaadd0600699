// Chooses the experts of a token and their weights (DeepSeek-V2 paper, section 2.2; V3 paper,
// section 2.1.2).
#pragma once
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "model/config.h"

namespace tandem {

// Working memory of route_token().
struct RouterScratch {
  std::span<float> score, choice;  // [n_experts]
  std::span<float> groups;         // [n_groups]
};

// Chooses n_active experts for one token from its logits [n_experts]. `bias` [n_experts] affects
// the choice of experts but not their weights; empty if the router has none. Of equal scores the
// lower index wins. ids and weights [n_active] are sorted, best first.
void route_token(std::span<const float> logits, std::span<const float> bias,
                 const RouterConfig& router, RouterScratch scratch, std::span<int32_t> ids,
                 std::span<float> weights);

// n_active different experts for each of n_tokens, [n_tokens, n_active], drawn with equal
// probability from n_active_groups groups, or more if those have fewer experts: for measurements.
std::vector<int32_t> random_experts(const RouterConfig& router, int n_tokens, std::mt19937& random);

}  // namespace tandem
