// --simulate-routing: experts for measurements, whatever the router would choose. Weights stay
// those of the router's own choice, and texts are meaningless.
#pragma once
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "model/config.h"

namespace tandem {

struct SimulatedRouting {
  enum class Kind : uint8_t {
    kModel,            // the router chooses
    kBalancedRanks,    // every rank gets as many rows
    kBalancedExperts,  // every expert gets as many rows
    kGroupedRandom,    // different experts with equal probability, within the router's group limit
    kStatistics        // different experts as often as a file of routing statistics has them
  };
  Kind kind = Kind::kModel;
  int n_ranks = 0;        // kBalancedRanks: among so many; 0: among those that run
  std::string file = {};  // kStatistics
};

// "model", "balanced-ranks", "balanced-ranks:32", "balanced-experts", "grouped-random" or a file.
// Throws Error for anything else.
SimulatedRouting simulated_routing(const std::string& text);
std::string name_of(const SimulatedRouting& routing);  // the same text

// The ranks that divide a layer's experts.
struct SharingRanks {
  int n = 1;
  // Those that have an expert of a layer; null: this process has all.
  std::function<std::span<const int32_t>(int layer, int expert)> of_expert = {};
};

// Throws Error where the model, or so many ranks, cannot be measured with this routing.
void require_sound(const SimulatedRouting& routing, const ModelConfig& config, int n_ranks = 1);

// The table of choices for `config`, which may have fewer layers than `whole`, the model that a
// file of statistics describes: its layers with experts then take turns. Null for kModel. The same
// arguments give the same table everywhere. Throws Error as require_sound() does, and where a rank
// has too few experts.
//
// kBalancedRanks: of all places of a step [tokens, n_active], in order, place i is an expert of
// rank i mod R, where R is the number of ranks: the first of the rank, for further places of the
// same token the ones after it. Ranks that are only stated have blocks of consecutive experts, so
// place i is expert (i mod R) * n_experts / R for R >= n_active, as in lmdeploy's simulation.
// kBalancedExperts: place i is expert i mod n_experts.
std::shared_ptr<const SimulatedChoices> simulated_choices(const SimulatedRouting& routing,
                                                          const ModelConfig& config,
                                                          const ModelConfig& whole,
                                                          const SharingRanks& ranks = {});

}  // namespace tandem
