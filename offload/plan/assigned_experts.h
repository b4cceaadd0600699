// Experts of all layers assigned to ranks by their use, as a placement has them.
#pragma once
#include <map>
#include <utility>
#include <vector>

#include "offload/balance/assign.h"
#include "offload/plan/predict.h"

namespace tandem {

// Caches assignments by the number of ranks and replicas, which several subsets of a machine share.
class AssignedExperts {
 public:
  // References outlive the object.
  AssignedExperts(const PlanInput& in, WeightFormat format) : in_(in), format_(format) {}
  // Each layer's experts and n_redundant replicas on devices, which are in the order of their
  // hosts.
  std::vector<LayerExperts> on(const std::vector<DeviceId>& devices, int n_redundant);

 private:
  const std::vector<OwnersOfLayer>& owners(const RankLayout& layout, int n_redundant);

  const PlanInput& in_;
  const WeightFormat format_;
  // By ranks, nodes and replicas; of each MoE layer, or of all alike under even routing.
  std::map<std::tuple<int, int, int>, std::vector<OwnersOfLayer>> known_;
};

// How even the experts of a placement are on its ranks, and how even they could be: the means of
// the layers' balancedness. Even routing and placements on one rank have none.
struct PlacedBalance {
  double placed, own, eplb;         // eplb: 0 where its sizes do not divide
  int n_by_eplb = 0, n_layers = 0;  // layers in which EPLB's assignment is the more even one
};
std::optional<PlacedBalance> balance_of(const PlanInput& in, const Placement& placement);

}  // namespace tandem
