#include "offload/plan/assigned_experts.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/rounding.h"
#include "model/cost.h"
#include "model/parameters.h"
#include "offload/plan/rates.h"

namespace tandem {
namespace {

// Nodes are hosts, unless the hosts have different numbers of the devices.
RankLayout layout_of(const PlanInput& in, const std::vector<DeviceId>& devices) {
  const auto n = static_cast<int>(devices.size());
  int n_hosts = 0;
  for (int i = 0; i < n; ++i) n_hosts += i == 0 || devices[i].host != devices[i - 1].host;
  bool alike = n % n_hosts == 0;
  for (int i = 0; alike && i < n; ++i)
    alike = devices[i].host == devices[i - i % (n / n_hosts)].host;
  return {n, alike ? n_hosts : 1, std::max(in.config.router.n_groups, 1)};
}

std::vector<double> shares_of(const PlanInput& in, int layer) {
  std::vector<double> shares(in.config.router.n_experts);
  for (int e = 0; e < in.config.router.n_experts; ++e) shares[e] = in.routing.share(layer, e);
  return shares;
}

// Experts with the same owners form a group, found through the first owner.
std::vector<ExpertGroup> groups_of(const OwnersOfLayer& owners, WeightFormat format,
                                   const std::vector<DeviceId>& devices) {
  std::vector<ExpertGroup> groups;
  std::vector<std::vector<size_t>> groups_of_first(devices.size());
  for (int e = 0; e < std::ssize(owners); ++e) {
    std::vector<DeviceId> of_expert;
    for (const int rank : owners[e]) of_expert.push_back(devices[rank]);
    auto& known = groups_of_first[owners[e][0]];
    const auto found = std::find_if(known.begin(), known.end(),
                                    [&](size_t g) { return groups[g].owners == of_expert; });
    if (found != known.end()) {
      groups[*found].experts.push_back(e);
      continue;
    }
    known.push_back(groups.size());
    groups.push_back({{e}, format, std::move(of_expert)});
  }
  return groups;
}

// Experts a second: under even routing each expert of a step has `rows` rows.
double speed_of(const PlanInput& in, DeviceId cpu, WeightFormat format,
                const NumaColumns& numa_columns) {
  const Rates rates = rates_of(in.machine, cpu, numa_columns);
  const double rows =
      std::max(1.0, tokens_per_expert(in.config, std::max(1, in.workload.concurrency)));
  return 1 / product_seconds(rates, Product::kExperts, format.dtype,
                             {static_cast<double>(routed_expert_bytes(in.config, format)),
                              rows * token_ops(in.config).expert, rows});
}

}  // namespace

ExpertHosts expert_hosts(const PlanInput& in, const Placement& without_experts, WeightFormat format,
                         const std::vector<DeviceId>& devices) {
  const ModelConfig& c = in.config;
  ExpertHosts hosts;
  const int64_t of_layers = moe_layers(c) * routed_expert_bytes(c, format);
  for (const DeviceMemory& m : memory_by_device(c, in.machine, without_experts)) {
    if (std::find(devices.begin(), devices.end(), m.device) == devices.end()) continue;
    hosts.devices.push_back(m.device);
    hosts.speeds.push_back(speed_of(in, m.device, format, without_experts.numa_columns));
    hosts.slots.push_back(
        static_cast<int>(std::clamp<int64_t>(m.free_bytes() / of_layers, 0, c.router.n_experts)));
  }
  const int wanted = c.router.n_experts + in.workload.redundant_experts.value_or(0);
  const int missing = wanted - std::accumulate(hosts.slots.begin(), hosts.slots.end(), 0);
  if (missing > 0)
    for (int& n : hosts.slots) n += ceil_div(missing, static_cast<int>(hosts.slots.size()));
  return hosts;
}

std::vector<ExpertGroup> groups_on_hosts(const PlanInput& in, const ExpertHosts& hosts,
                                         const std::vector<int>& experts, WeightFormat format,
                                         int n_redundant) {
  const auto n = static_cast<int>(experts.size()), n_hosts = static_cast<int>(hosts.devices.size());
  if (n_hosts == 1 || n == 0) return {{experts, format, hosts.devices}};
  n_redundant = std::min(n_redundant, n * (n_hosts - 1));
  OwnersOfLayer owners(n);
  if (in.routing.uniform()) {
    // Any experts are as good: side by side, and round again for replicas.
    std::vector<int> most = hosts.slots;
    for (int& slots : most) slots = std::min(slots, n);
    const std::vector<int> counts = counts_by_speed(hosts.speeds, most, n + n_redundant);
    int next = 0;
    for (int rank = 0; rank < n_hosts; ++rank)
      for (int i = 0; i < counts[rank]; ++i) owners[next++ % n].push_back(rank);
  } else {
    std::vector<double> shares(n, 0);
    for (int l = 0; l < in.config.n_layers; ++l)
      for (int i = 0; in.config.is_moe(l) && i < n; ++i)
        shares[i] += in.routing.share(l, experts[i]);
    owners = assign_by_speed(shares, hosts.speeds, hosts.slots, n_redundant);
  }
  std::vector<ExpertGroup> groups = groups_of(owners, format, hosts.devices);
  for (ExpertGroup& group : groups)
    for (int& e : group.experts) e = experts[e];
  return groups;
}

std::vector<LayerExperts> layers_on_hosts(const PlanInput& in, const ExpertHosts& hosts,
                                          WeightFormat format, int n_redundant) {
  const ModelConfig& c = in.config;
  std::vector<int> all(c.router.n_experts);
  std::iota(all.begin(), all.end(), 0);
  int first = 0;
  while (!c.is_moe(first)) ++first;
  return {{first, c.n_layers - 1, groups_on_hosts(in, hosts, all, format, n_redundant)}};
}

std::vector<LayerExperts> AssignedExperts::on(const std::vector<DeviceId>& devices,
                                              int n_redundant) {
  const ModelConfig& c = in_.config;
  const bool alike = in_.routing.uniform() || devices.size() == 1;
  const std::vector<OwnersOfLayer>& owners = this->owners(layout_of(in_, devices), n_redundant);
  std::vector<LayerExperts> layers;
  for (int l = 0; l < c.n_layers; ++l) {
    if (!c.is_moe(l)) continue;
    const int last = alike ? c.n_layers - 1 : l;
    layers.push_back({l, last, groups_of(owners[layers.size()], format_, devices)});
    l = last;
  }
  return layers;
}

const std::vector<OwnersOfLayer>& AssignedExperts::owners(const RankLayout& layout,
                                                          int n_redundant) {
  const auto [known, is_new] = known_.try_emplace({layout.n_ranks, layout.n_nodes, n_redundant});
  if (is_new)
    for (int l = 0; l < in_.config.n_layers; ++l) {
      if (!in_.config.is_moe(l)) continue;
      known->second.push_back(assign_balanced(shares_of(in_, l), layout, n_redundant).owners);
      if (in_.routing.uniform() || layout.n_ranks == 1) break;
    }
  return known->second;
}

std::optional<PlacedBalance> balance_of(const PlanInput& in, const Placement& p) {
  if (in.routing.uniform()) return {};
  PlacedBalance sum = {};
  for (int l = 0; l < in.config.n_layers; ++l) {
    if (!in.config.is_moe(l)) continue;
    std::vector<DeviceId> devices;
    OwnersOfLayer owners(in.config.router.n_experts);
    int n_redundant = 0;
    for (const ExpertGroup& group : experts_of_layer(p, l)->groups) {
      if (group.sliced) return {};
      devices.insert(devices.end(), group.owners.begin(), group.owners.end());
      n_redundant += static_cast<int>(group.experts.size() * (group.owners.size() - 1));
    }
    std::sort(devices.begin(), devices.end());
    devices.erase(std::unique(devices.begin(), devices.end()), devices.end());
    const auto is_other_kind = [&](DeviceId d) {
      return d.is_cpu() != devices[0].is_cpu() ||
             in.machine.kind_of(d.host) != in.machine.kind_of(devices[0].host);
    };
    if (devices.size() < 2 || std::any_of(devices.begin(), devices.end(), is_other_kind)) return {};
    for (const ExpertGroup& group : experts_of_layer(p, l)->groups)
      for (const int e : group.experts)
        for (const DeviceId d : group.owners)
          owners[e].push_back(static_cast<int>(std::lower_bound(devices.begin(), devices.end(), d) -
                                               devices.begin()));
    const std::vector<double> shares = shares_of(in, l);
    const BalancedOwners best = assign_balanced(shares, layout_of(in, devices), n_redundant);
    sum.placed += balancedness(owners, shares, static_cast<int>(devices.size()));
    sum.own += best.own;
    sum.eplb += best.eplb;
    sum.n_by_eplb += best.by_eplb;
    ++sum.n_layers;
  }
  for (double* const mean : {&sum.placed, &sum.own, &sum.eplb}) *mean /= sum.n_layers;
  return sum;
}

}  // namespace tandem
