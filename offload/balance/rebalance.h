// New owners for the experts of a model that runs, from how often each expert was chosen. A rank
// keeps its number of experts of each layer, so that they take each other's memory.
#pragma once
#include <cstdint>
#include <vector>

#include "core/topology.h"
#include "offload/balance/assign.h"

namespace tandem {

// From now on these ranks have the expert. Ranks are numbered in the layer's pipeline stage.
struct ExpertChange {
  int32_t layer, expert;
  std::vector<int32_t> ranks;  // ascending
  bool operator==(const ExpertChange&) const = default;
};

// A layer of the model, its experts' owners and their use.
struct LayerUse {
  int layer;
  Slice ranks;              // those of its stage
  OwnersOfLayer owners;     // [n_experts], numbered in the stage
  std::vector<double> use;  // [n_experts] how often each was chosen
};

struct RebalancePlan {
  // What changes at once, in this order. Each time every rank has room for the experts that come.
  std::vector<std::vector<ExpertChange>> waves;
  int n_layers = 0;
  int64_t n_arrivals = 0;        // experts that a rank is to read
  double before = 1, after = 1;  // balancedness, mean of the layers weighted by their use
};

struct RebalanceLimits {
  int n_of_host = 1 << 30;   // ranks of a host
  int n_groups = 1;          // the router's
  double least_gain = 0.02;  // in a layer's balancedness; less changes nothing there
  // [ranks, the same in all layers] whose experts stay, and so do replicas of these on others;
  // then hosts and groups do not matter. Empty: of none.
  std::vector<bool> fixed = {};
};

// The most even of: swaps from the present owners, and assignments from scratch as
// assign_balanced() makes them, whose ranks are numbered so that few experts move. Swaps move
// fewer, and are taken up to 0.01 below.
OwnersOfLayer rebalanced(const OwnersOfLayer& now, const std::vector<double>& use,
                         const RankLayout& layout);

// Room for arriving experts that a rank needs: the most that it has of a layer. [ranks]
std::vector<int> spare_slots(const std::vector<LayerUse>& layers);

// The balancedness among the ranks that are not fixed, of the experts that are theirs alone: mean
// of the layers weighted by their use. 1 without such use.
double movable_balancedness(const std::vector<LayerUse>& layers, const std::vector<bool>& fixed);

// With fixed ranks, `before` and `after` are movable_balancedness().
RebalancePlan plan_rebalance(const std::vector<LayerUse>& layers, const RebalanceLimits& limits);

}  // namespace tandem
