// Which experts a token goes to, and with what weight (DeepSeek-V2 paper, section 2.2; V3 paper,
// section 2.1.2).
#pragma once
#include <cstdint>
#include <span>

#include "model/config.h"

namespace tandem {

// Working memory of route_token.
struct RouterScratch {
  std::span<float> score, choice;  // [n_experts]
  std::span<float> groups;         // [n_groups]
};

// Chooses n_active experts for one token from its logits [n_experts]. `bias` [n_experts] steers the
// choice of experts and never their weights; empty where the router has none. Equal scores: the
// lower index wins. ids and weights [n_active] come best first.
void route_token(std::span<const float> logits, std::span<const float> bias,
                 const RouterConfig& router, RouterScratch scratch, std::span<int32_t> ids,
                 std::span<float> weights);

}  // namespace tandem
