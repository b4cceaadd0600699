#include <algorithm>

#include "offload/plan/assign.h"
#include "offload/plan/candidates.h"
#include "offload/plan/cost.h"
#include "offload/plan/rules.h"

namespace tandem {
namespace {

constexpr int kUsualRedundancy = 32;  // DeepSeek's own deployments

std::vector<std::vector<Device>> gpu_subsets(const Machine& m);
std::vector<LayerExperts> dealt(const PlanInput& in, WeightFormat format,
                                const std::vector<Device>& ranks, int n_redundant);
void visit_tensor_parallel(const PlanInput& in, WeightFormat format,
                           const std::vector<Device>& gpus, const VisitPlacement& visit);
void visit_expert_parallel(const PlanInput& in, WeightFormat format,
                           const std::vector<Device>& gpus, const VisitPlacement& visit);
void visit_roles(const PlanInput& in, WeightFormat format, const std::vector<Device>& gpus,
                 const VisitPlacement& visit);
void visit_details(const PlanInput& in, Placement& p, const VisitPlacement& visit);
std::vector<int> tensor_parallel_ways(const PlanInput& in, size_t n_gpus);

}  // namespace

void visit_gpu_candidates(const PlanInput& in, WeightFormat format, const VisitPlacement& visit) {
  for (const std::vector<Device>& gpus : gpu_subsets(in.machine)) {
    visit_tensor_parallel(in, format, gpus, visit);
    if (gpus.size() == 1 || in.config.router.n_experts == 0) continue;
    visit_expert_parallel(in, format, gpus, visit);
    visit_roles(in, format, gpus, visit);
  }
}

namespace {

// Powers of two within a host, then powers of two of whole hosts, and all.
std::vector<std::vector<Device>> gpu_subsets(const Machine& m) {
  const int a_host = static_cast<int>(m.gpus.size());
  std::vector<int> sizes;
  for (int n = 1; n < a_host; n *= 2) sizes.push_back(n);
  for (int hosts = 1; hosts < m.hosts; hosts *= 2) sizes.push_back(a_host * hosts);
  sizes.push_back(a_host * m.hosts);
  std::vector<std::vector<Device>> subsets;
  for (const int size : sizes) {
    if (size == 0) continue;
    std::vector<Device> gpus;
    gpus.reserve(size);
    for (int i = 0; i < size; ++i) gpus.push_back({i / a_host, i % a_host});
    subsets.push_back(std::move(gpus));
  }
  return subsets;
}

std::vector<int> tensor_parallel_ways(const PlanInput& in, size_t n_gpus) {
  std::vector<int> ways;
  for (int t = 1; t <= static_cast<int>(std::min(n_gpus, in.machine.gpus.size())); t *= 2)
    if (n_gpus % t == 0 && !tensor_parallel_refusal(in.config, t)) ways.push_back(t);
  return ways;
}

// One replica: layers cut into a pipeline of stages, each shared by neighbours, experts too.
void visit_tensor_parallel(const PlanInput& in, WeightFormat format,
                           const std::vector<Device>& gpus, const VisitPlacement& visit) {
  const ModelConfig& c = in.config;
  for (const int tp : tensor_parallel_ways(in, gpus.size())) {
    const int pp = static_cast<int>(gpus.size()) / tp;
    if (pp > c.n_layers) continue;
    if (tp > 1 && split_refusal("expert FFN", c.expert_dim, tp) && c.router.n_experts > 0) continue;
    Placement p;
    p.backbone = stored_format(c);
    for (int s = 0; s < pp; ++s) {
      const int first = c.n_layers * s / pp, last = c.n_layers * (s + 1) / pp - 1;
      const std::vector<Device> devices(gpus.begin() + s * tp, gpus.begin() + (s + 1) * tp);
      p.stages.push_back({first, last, devices, tp});
      int moe = first;
      while (moe <= last && !c.is_moe(moe)) ++moe;
      if (moe > last) continue;
      ExpertGroup group = {{}, format, devices, tp > 1};
      for (int e = 0; e < c.router.n_experts; ++e) group.experts.push_back(e);
      p.layers.push_back({moe, last, {group}});
    }
    visit_details(in, p, visit);
  }
}

// Every GPU has a part of the backbone's replicas and of the experts.
void visit_expert_parallel(const PlanInput& in, WeightFormat format,
                           const std::vector<Device>& gpus, const VisitPlacement& visit) {
  const ModelConfig& c = in.config;
  const int n = static_cast<int>(gpus.size());
  std::vector<int> redundancies = {0};
  const int slots = (c.router.n_experts + kUsualRedundancy + n - 1) / n;
  const int filled = slots * n - c.router.n_experts;
  if (filled > 0 && filled <= c.router.n_experts * (n - 1)) redundancies.push_back(filled);
  for (const int n_redundant : redundancies) {
    Placement p;
    p.backbone = stored_format(c);
    p.layers = dealt(in, format, gpus, n_redundant);
    for (const int tp : tensor_parallel_ways(in, gpus.size())) {
      p.stages = {{0, c.n_layers - 1, gpus, tp}};
      visit_details(in, p, visit);
    }
  }
}

// The last GPUs only hold experts, the others only the backbone and the KV cache.
void visit_roles(const PlanInput& in, WeightFormat format, const std::vector<Device>& gpus,
                 const VisitPlacement& visit) {
  const ModelConfig& c = in.config;
  const int n = static_cast<int>(gpus.size());
  int n_moe = 0;
  for (int l = 0; l < c.n_layers; ++l) n_moe += c.is_moe(l) ? 1 : 0;
  const int64_t a_gpu =
      in.machine.gpus[0].memory_bytes - reserved_bytes(in.machine.gpus[0].memory_bytes, false);
  const int64_t slots = a_gpu / std::max<int64_t>(1, n_moe * routed_expert_bytes(c, format));
  if (slots == 0) return;
  const int least = static_cast<int>((c.router.n_experts + slots - 1) / slots);
  std::vector<int> counts;
  for (const int experts : {n / 2, n * 5 / 8, n * 3 / 4, n * 7 / 8, n - 4, n - 3, n - 2, n - 1})
    if (experts >= least && experts < n &&
        std::find(counts.begin(), counts.end(), experts) == counts.end())
      counts.push_back(experts);
  for (const int experts : counts) {
    Placement p;
    p.backbone = stored_format(c);
    p.layers = dealt(in, format, {gpus.end() - experts, gpus.end()}, 0);
    p.stages = {{0, c.n_layers - 1, {gpus.begin(), gpus.end() - experts}, 1}};
    visit_details(in, p, visit);
  }
}

void visit_details(const PlanInput& in, Placement& p, const VisitPlacement& visit) {
  const bool many = p.stages.size() > 1 || p.stages[0].devices.size() > 1;
  for (const int chunk : prefill_chunks(in.workload))
    for (const bool head_replicated : {true, false})
      for (const bool embedding_on_cpu : {false, true})
        for (const int micro_batches : {1, 2}) {
          if (!head_replicated && !many) continue;
          if (micro_batches > 1 && in.workload.concurrency == 1) continue;
          p.prefill_chunk_tokens = chunk;
          p.head_replicated = head_replicated;
          p.embedding_on_cpu = embedding_on_cpu;
          p.micro_batches = micro_batches;
          p.kv_tokens = 0;
          visit(p);
        }
}

std::vector<LayerExperts> dealt(const PlanInput& in, WeightFormat format,
                                const std::vector<Device>& ranks, int n_redundant) {
  const ModelConfig& c = in.config;
  std::vector<LayerExperts> layers;
  for (int l = 0; l < c.n_layers; ++l) {
    if (!c.is_moe(l)) continue;
    LayerExperts layer = {l, in.routing.uniform() ? c.n_layers - 1 : l, {}};
    std::vector<double> shares(c.router.n_experts);
    for (int e = 0; e < c.router.n_experts; ++e) shares[e] = in.routing.share(l, e);
    const auto owners = deal_experts(shares, static_cast<int>(ranks.size()), n_redundant);
    // Experts with the same owners form a group; the first owner finds it.
    std::vector<std::vector<size_t>> groups_of(ranks.size());
    for (int e = 0; e < c.router.n_experts; ++e) {
      std::vector<Device> devices;
      for (const int rank : owners[e]) devices.push_back(ranks[rank]);
      auto& known = groups_of[owners[e][0]];
      const auto found = std::find_if(known.begin(), known.end(),
                                      [&](size_t g) { return layer.groups[g].owners == devices; });
      if (found != known.end()) {
        layer.groups[*found].experts.push_back(e);
        continue;
      }
      known.push_back(layer.groups.size());
      layer.groups.push_back({{e}, format, std::move(devices)});
    }
    layers.push_back(std::move(layer));
    l = layers.back().last;
  }
  return layers;
}

}  // namespace
}  // namespace tandem
