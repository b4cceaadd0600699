#include "offload/plan/moving_experts.h"

#include <algorithm>
#include <set>

#include "model/cost.h"
#include "offload/balance/hot_experts.h"

namespace tandem {
namespace {

std::set<DeviceId> owners_of(const LayerExperts& layer) {
  std::set<DeviceId> owners;
  for (const ExpertGroup& group : layer.groups)
    owners.insert(group.owners.begin(), group.owners.end());
  return owners;
}

// A GPU and the CPU of its host have the experts of a layer.
bool is_pair(const std::set<DeviceId>& owners) {
  return owners.size() == 2 && owners.begin()->is_cpu() && !owners.rbegin()->is_cpu() &&
         owners.begin()->host == owners.rbegin()->host;
}

bool has_pair(const Placement& p) {
  return std::any_of(p.layers.begin(), p.layers.end(),
                     [](const LayerExperts& l) { return is_pair(owners_of(l)); });
}

}  // namespace

std::optional<std::string> why_experts_stay(const Placement& p) {
  if (p.layers.empty()) return "the model has none";
  std::set<DeviceId> all;
  size_t most = 0;  // owners of one layer
  for (const LayerExperts& l : p.layers) {
    for (const ExpertGroup& group : l.groups)
      if (group.sliced) return "every device has columns of each";
    const std::set<DeviceId> owners = owners_of(l);
    most = std::max(most, owners.size());
    all.insert(owners.begin(), owners.end());
  }
  if (!worker_hosts(p).empty()) return "workers keep theirs";
  if (most < 2) return "all of a layer are on one device";
  const bool on_cpu = all.begin()->is_cpu();
  const bool mixed =
      std::any_of(all.begin(), all.end(), [on_cpu](DeviceId d) { return d.is_cpu() != on_cpu; });
  const bool one_gpu = p.stages.size() == 1 && p.stages[0].devices.size() == 1;
  if (mixed && !(is_pair(all) && one_gpu)) return "GPUs have some, and CPUs the others";
  const bool gpu_backbone = !p.stages.empty() && !p.stages[0].devices[0].is_cpu();
  if (!mixed && on_cpu && gpu_backbone) return "they are on the CPUs of ranks with GPUs";
  return {};
}

int spare_experts(const Placement& p, DeviceId device) {
  int most = 0;
  for (const LayerExperts& l : p.layers) {
    int n = 0;
    for (const ExpertGroup& group : l.groups)
      if (group.is_on(device)) n += static_cast<int>(group.experts.size());
    most = std::max(most, n);
  }
  return most > 0 && has_pair(p) ? kHotExpertsAtOnce : most;
}

std::optional<WeightFormat> format_of_experts(const ModelConfig& c, const Placement& p,
                                              DeviceId device) {
  std::optional<WeightFormat> widest;
  for (const LayerExperts& l : p.layers)
    for (const ExpertGroup& group : l.groups)
      if (group.is_on(device) &&
          (!widest || routed_expert_bytes(c, group.format) > routed_expert_bytes(c, *widest)))
        widest = group.format;
  return widest;
}

}  // namespace tandem
