// Experts of all layers assigned to ranks by their use, as a placement has them.
#pragma once
#include <map>
#include <utility>
#include <vector>

#include "offload/balance/assign.h"
#include "offload/plan/predict.h"

namespace tandem {

// CPUs or GPUs that hold experts and need not be alike.
struct ExpertHosts {
  std::vector<DeviceId> devices;  // in the order of their hosts
  std::vector<double> speeds;     // relative to each other
  std::vector<int> slots;         // experts of a layer for which each has memory
};
// Speeds for steps of the workload, and slots beside the backbone, cache and tables of a placement
// without experts. If the slots do not suffice, the hosts get as many more as are missing, evenly:
// the placement will not fit.
ExpertHosts expert_hosts(const PlanInput& in, const Placement& without_experts, WeightFormat format,
                         const std::vector<DeviceId>& devices);

// `experts` of every layer and n_redundant replicas on hosts that then end together. A host has the
// same experts of all layers, as `tandem worker` has them: by their mean use, or under even routing
// a range of them.
std::vector<ExpertGroup> groups_on_hosts(const PlanInput& in, const ExpertHosts& hosts,
                                         const std::vector<int>& experts, WeightFormat format,
                                         int n_redundant);
// All experts.
std::vector<LayerExperts> layers_on_hosts(const PlanInput& in, const ExpertHosts& hosts,
                                          WeightFormat format, int n_redundant);

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
// the layers' balancedness. Even routing, placements on one rank, and devices that are not alike
// have none.
struct PlacedBalance {
  double placed, own, eplb;         // eplb: 0 where its sizes do not divide
  int n_by_eplb = 0, n_layers = 0;  // layers in which EPLB's assignment is the more even one
};
std::optional<PlacedBalance> balance_of(const PlanInput& in, const Placement& placement);

}  // namespace tandem
