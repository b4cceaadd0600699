#include <algorithm>

#include "core/check.h"
#include "offload/plan/cost.h"
#include "offload/plan/layer_time.h"
#include "offload/plan/simulate.h"

namespace tandem {
namespace {

// The backbone's devices, then other devices that own experts.
std::vector<DeviceId> ranks_of(const Placement& p) {
  std::vector<DeviceId> ranks = p.stages[0].devices;
  for (const ExpertGroup& group : p.layers[0].groups)
    for (const DeviceId d : group.owners)
      if (std::find(ranks.begin(), ranks.end(), d) == ranks.end()) ranks.push_back(d);
  return ranks;
}

bool suits(const Placement& p) {
  if (p.stages.size() != 1 || p.stages[0].tp != 1 || p.layers.empty()) return false;
  const std::vector<ExpertGroup>& groups = p.layers[0].groups;
  const bool on_gpus = std::all_of(groups.begin(), groups.end(), [](const ExpertGroup& g) {
    return std::none_of(g.owners.begin(), g.owners.end(), [](DeviceId d) { return d.is_cpu(); });
  });
  const bool on_cpus = std::all_of(groups.begin(), groups.end(), [](const ExpertGroup& g) {
    return !g.sliced &&
           std::all_of(g.owners.begin(), g.owners.end(), [](DeviceId d) { return d.is_cpu(); });
  });
  const std::vector<DeviceId> ranks = ranks_of(p);
  const bool several_hosts = ranks.front().host != ranks.back().host;
  return ranks.size() > 1 && !ranks[0].is_cpu() && (on_gpus || (on_cpus && several_hosts));
}

}  // namespace

SimulatedCluster cluster_of(const PlanInput& in, const Placement& p, double skew) {
  require(suits(p),
          "a simulation is of replicas whose experts are spread over GPUs, or over the CPUs of "
          "several hosts, and this placement is not: ask for --objective throughput and more "
          "--concurrency, or another machine");
  const Stage& stage = p.stages[0];
  const std::vector<DeviceId> ranks = ranks_of(p);
  const auto n = static_cast<int>(stage.devices.size());
  SimulatedCluster c{.n_ranks = static_cast<int>(ranks.size()),
                     .n_backbone_ranks = n,
                     .n_experts = in.config.router.n_experts,
                     .top_k = in.config.router.n_active,
                     .owners = std::vector<std::vector<int>>(in.config.router.n_experts),
                     .skew = skew};
  const std::vector<ExpertGroup>& groups = p.layers[0].groups;
  for (const ExpertGroup& group : groups)
    for (const DeviceId d : group.owners)
      for (const int e : group.experts)
        c.owners[e].push_back(
            static_cast<int>(std::find(ranks.begin(), ranks.end(), d) - ranks.begin()));
  for (const auto& owners : c.owners) c.n_redundant += static_cast<int>(owners.size()) - 1;

  c.tokens_per_rank = std::max(1, in.workload.concurrency / n);
  c.two_batches = p.micro_batches == 2;
  const double context = in.workload.prompt_tokens + in.workload.output_tokens / 2.0;
  const int layer = p.layers[0].first;
  const auto backbone = [&](double tokens) {
    const LayerTime t = LayerModel(in, p, {tokens, context, false, 1}).backbone(stage, layer);
    return t.seconds;
  };
  const double tokens = c.tokens_per_rank, fewer = tokens / 2;
  c.backbone_seconds_per_token = (backbone(tokens) - backbone(fewer)) / (tokens - fewer);
  c.backbone_seconds = backbone(tokens) - tokens * c.backbone_seconds_per_token;

  const DeviceId owner = groups[0].owners[0];
  const WeightFormat format = groups[0].format;
  const Rates rates = rates_of(in.machine, owner, p.numa_columns);
  const double rows = std::max(1.0, tokens * n * c.top_k / c.n_experts);
  const double ratio =
      product_ratio(rates.kind, Product::kExperts, format.dtype, rows, rates.measured);
  c.reading_hides = !owner.is_cpu();
  c.expert_seconds = static_cast<double>(routed_expert_bytes(in.config, format)) /
                     rates.read_bytes_per_second / ratio;
  c.expert_seconds_per_row =
      token_ops(in.config).expert / peak_for(rates, format.dtype, !owner.is_cpu()) / ratio;

  const bool one_host = ranks.front().host == ranks.back().host;
  const Link link = one_host ? in.machine.gpu_link : in.machine.network;
  c.link_bytes_per_second = link.bytes_per_second;
  c.link_latency_seconds = link.latency_seconds;
  if (owner.is_cpu())
    for (const DeviceId d : ranks) c.link_of.push_back(d.host);
  else if (!one_host)
    c.link_bytes_per_second /= static_cast<double>(in.machine.gpus.size());
  c.dispatch_bytes = static_cast<double>(dispatch_bytes(in.config)) / c.top_k;
  c.combine_bytes = static_cast<double>(combine_bytes(in.config)) / c.top_k;
  return c;
}

}  // namespace tandem
