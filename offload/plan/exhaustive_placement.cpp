#include "offload/plan/exhaustive_placement.h"

#include <algorithm>

#include "model/cost.h"

namespace tandem {

void try_all_placements(const PlanInput& in, Placement& placement) {
  // Allows 3 devices with 8 experts, or 2 devices with 13.
  constexpr int64_t kMaxAssignments = 10'000;
  // A GPU with experts has a part of the backbone.
  std::vector<DeviceId> devices = {{0, -1}};
  for (const DeviceId d : placement.stages[0].devices)
    if (!d.is_cpu()) devices.push_back(d);
  const auto n_devices = static_cast<int>(devices.size());
  if (in.machine.n_hosts() > 1 || n_devices <= 1 || placement.layers.empty()) return;
  std::vector<int> layers;
  for (int l = 0; l < in.config.n_layers; ++l)
    if (in.config.is_moe(l)) layers.push_back(l);
  const int n_experts = in.config.router.n_experts;
  int64_t ways = 1;
  for (size_t i = 0; i < layers.size() * n_experts && ways <= kMaxAssignments; ++i)
    ways *= n_devices;
  if (ways > kMaxAssignments) return;
  for (const LayerExperts& l : placement.layers)
    for (const ExpertGroup& g : l.groups)
      if (g.owners.size() > 1) return;
  const WeightFormat format = placement.layers[0].groups[0].format;
  double least = predict(in, placement).score;
  Placement other = placement;
  for (int64_t way = 0; way < ways; ++way) {
    other.layers.clear();
    int64_t rest = way;
    for (const int l : layers) {
      std::vector<ExpertGroup> groups;
      for (int d = 0; d < n_devices; ++d)
        groups.push_back({{}, d == 0 ? format : stored_expert_format(in.config), {devices[d]}});
      for (int e = 0; e < n_experts; ++e, rest /= n_devices)
        groups[rest % n_devices].experts.push_back(e);
      std::erase_if(groups, [](const ExpertGroup& g) { return g.experts.empty(); });
      other.layers.push_back({l, l, std::move(groups)});
    }
    const Prediction then = predict(in, other);
    const bool fits = std::all_of(then.memory.begin(), then.memory.end(),
                                  [](const DeviceMemory& m) { return m.free_bytes() >= 0; });
    if (!fits || then.score >= least) continue;
    least = then.score;
    placement.layers = other.layers;
  }
}

}  // namespace tandem
