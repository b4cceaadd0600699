#include <algorithm>
#include <cmath>

#include "offload/plan/assign.h"
#include "offload/plan/candidates.h"
#include "offload/plan/cost.h"
#include "offload/plan/rates.h"
#include "offload/plan/rules.h"

namespace tandem {
namespace {

// Which devices compute the backbone.
struct Layout {
  std::vector<Device> devices;
  int tp;
};

std::vector<Layout> backbone_layouts(const PlanInput& in);
std::vector<LayerExperts> all_on_cpus(const PlanInput& in, WeightFormat format);
void move_hot_experts(const PlanInput& in, WeightFormat format, Placement& p);
LayerExperts seated(const PlanInput& in, WeightFormat format, int layer, size_t n_seats,
                    const std::vector<int>& owners);
std::vector<LayerExperts> seat_by_use(const PlanInput& in, WeightFormat format,
                                      const std::vector<int>& moe_layers,
                                      const std::vector<ExpertSeat>& seats, double tokens);
std::vector<LayerExperts> seat_alike(const PlanInput& in, WeightFormat format,
                                     const std::vector<int>& moe_layers,
                                     const std::vector<ExpertSeat>& seats, double tokens);

}  // namespace

void visit_cpu_candidates(const PlanInput& in, WeightFormat format, const VisitPlacement& visit) {
  Placement p;
  p.backbone = stored_format(in.config);
  p.numa_columns = numa_slices(in.config, in.machine);
  const std::vector<LayerExperts> on_cpus = all_on_cpus(in, format);
  const auto visit_with = [&](const Placement& skeleton) {
    Placement copy = skeleton;
    visit(copy);
  };
  for (const Layout& layout : backbone_layouts(in)) {
    p.stages = {{0, in.config.n_layers - 1, layout.devices, layout.tp}};
    p.layers = on_cpus;
    const bool gpu = !layout.devices[0].is_cpu();
    const int threshold = gpu ? least_streamed_chunk(in, p) : 0;
    for (const int chunk : prefill_chunks(in.workload))
      for (const bool embedding_on_cpu : {false, true})
        for (const bool head_on_cpu : {false, true})
          for (const int micro_batches : {1, 2})
            for (const int stream_from : {0, threshold}) {
              if (!gpu && (!embedding_on_cpu || !head_on_cpu || micro_batches > 1)) continue;
              if (stream_from == 0 && threshold > 0 && chunk >= threshold &&
                  in.workload.prompt_tokens >= threshold)
                continue;  // slower by definition of the threshold
              p.prefill_chunk_tokens = chunk;
              p.embedding_on_cpu = embedding_on_cpu;
              p.head_on_cpu = head_on_cpu;
              p.micro_batches = micro_batches;
              p.stream_from_tokens = stream_from;
              p.layers = on_cpus;
              visit_with(p);
              if (in.machine.gpus.empty() || in.machine.hosts > 1) continue;
              move_hot_experts(in, format, p);
              visit_with(p);
              p.layers = on_cpus;
            }
  }
}

int64_t sequences_a_replica(const Placement& p, int concurrency) {
  const int dp = p.stages.front().dp();
  return (concurrency + dp - 1) / dp;
}

std::vector<int> numa_slices(const ModelConfig& c, const Machine& m) {
  const int blocks = c.expert_dim / kSplitMultiple;
  if (m.nodes.size() == 1 || c.router.n_experts == 0 || c.expert_dim % kSplitMultiple != 0 ||
      blocks < static_cast<int>(m.nodes.size()))
    return {};
  // One block after the other to the node that would finish it first.
  std::vector<int> columns(m.nodes.size(), 0);
  for (int i = 0; i < blocks; ++i) {
    size_t best = 0;
    double earliest = 0;
    for (size_t n = 0; n < columns.size(); ++n) {
      const double end = (columns[n] + kSplitMultiple) / m.nodes[n].read_bytes_per_second;
      if (n == 0 || end < earliest) best = n, earliest = end;
    }
    columns[best] += kSplitMultiple;
  }
  return columns;
}

std::vector<int> prefill_chunks(const Workload& w) {
  std::vector<int> chunks = {512};
  for (const int chunk : {2048, 8192})
    if (w.prompt_tokens > chunks.back()) chunks.push_back(chunk);
  return chunks;
}

int least_streamed_chunk(const PlanInput& in, const Placement& p) {
  constexpr int kStep = 64, kMost = 16384;
  const auto faster = [&](int tokens) {
    Placement with = p;
    const StepShape shape = {static_cast<double>(tokens), static_cast<double>(tokens), true, 1};
    with.stream_from_tokens = 0;
    const double here = predict_step(in, with, shape).moe.seconds;
    with.stream_from_tokens = 1;
    return predict_step(in, with, shape).moe.seconds < here;
  };
  if (!faster(kMost)) return 0;
  int least = kStep, most = kMost;  // the answer is within
  while (least < most) {
    const int middle = (least + most) / 2 / kStep * kStep;
    if (faster(middle))
      most = middle;
    else
      least = middle + kStep;
  }
  return least;
}

namespace {

std::vector<Layout> backbone_layouts(const PlanInput& in) {
  const Machine& m = in.machine;
  const int gpus = static_cast<int>(m.gpus.size());
  std::vector<Layout> layouts;
  std::vector<Device> cpus, all, first;
  for (int host = 0; host < m.hosts; ++host) {
    cpus.push_back({host, -1});
    for (int gpu = 0; gpu < gpus; ++gpu) all.push_back({host, gpu});
    if (gpus > 0) first.push_back({host, 0});
  }
  layouts.push_back({{cpus[0]}, 1});
  if (m.hosts > 1) layouts.push_back({cpus, 1});
  if (gpus == 0) return layouts;
  layouts.push_back({{{0, 0}}, 1});
  if (m.hosts > 1) layouts.push_back({first, 1});
  if (gpus > 1) {
    layouts.push_back({all, 1});
    if (!tensor_parallel_refusal(in.config, gpus)) layouts.push_back({all, gpus});
  }
  return layouts;
}

// On every host's CPUs an even part.
std::vector<LayerExperts> all_on_cpus(const PlanInput& in, WeightFormat format) {
  const ModelConfig& c = in.config;
  std::vector<LayerExperts> layers;
  if (c.router.n_experts == 0) return layers;
  int first = 0;
  while (first < c.n_layers && !c.is_moe(first)) ++first;
  const int last_alike = in.routing.uniform() || in.machine.hosts == 1 ? c.n_layers - 1 : first;
  for (int l = first; l < c.n_layers; ++l) {
    if (!c.is_moe(l)) continue;
    const int last = std::max(l, last_alike);
    LayerExperts layer = {l, last, {}};
    std::vector<double> shares(c.router.n_experts);
    for (int e = 0; e < c.router.n_experts; ++e) shares[e] = in.routing.share(l, e);
    const auto owners = deal_experts(shares, in.machine.hosts, 0);
    layer.groups.resize(in.machine.hosts);
    for (int e = 0; e < c.router.n_experts; ++e) layer.groups[owners[e][0]].experts.push_back(e);
    for (int host = 0; host < in.machine.hosts; ++host) {
      layer.groups[host].format = format;
      layer.groups[host].owners = {{host, -1}};
    }
    std::erase_if(layer.groups, [](const ExpertGroup& g) { return g.experts.empty(); });
    layers.push_back(std::move(layer));
    l = last;
  }
  return layers;
}

// One host: what is free of its GPUs takes experts, as many as fit and as long as that helps.
void move_hot_experts(const PlanInput& in, WeightFormat format, Placement& p) {
  const ModelConfig& c = in.config;
  const Workload& w = in.workload;
  p.kv_tokens = w.context * sequences_a_replica(p, w.concurrency);
  const int64_t expert = routed_expert_bytes(c, format);
  const double tokens = std::max(1, w.concurrency);
  const auto seconds = [&](Device d) {
    const double rows = std::max(1.0, tokens * c.router.n_active / c.router.n_experts);
    return product_seconds(rates_of(in.machine, d, p.numa_columns), Product::kExperts, format.dtype,
                           {static_cast<double>(expert), rows * token_ops(c).expert, rows});
  };
  std::vector<ExpertSeat> seats = {{seconds({0, -1}), int64_t{1} << 40}};
  for (const DeviceMemory& m : memory_by_device(c, in.machine, p)) {
    if (m.device.is_cpu()) continue;
    seats.push_back({seconds(m.device), std::max<int64_t>(0, m.free_bytes() / expert)});
  }
  p.kv_tokens = 0;
  std::vector<int> moe_layers;
  for (int l = 0; l < c.n_layers; ++l)
    if (c.is_moe(l)) moe_layers.push_back(l);
  p.layers = in.routing.uniform() ? seat_alike(in, format, moe_layers, seats, tokens)
                                  : seat_by_use(in, format, moe_layers, seats, tokens);
}

LayerExperts seated(const PlanInput& in, WeightFormat format, int layer, size_t n_seats,
                    const std::vector<int>& owners) {
  LayerExperts l = {layer, layer, {}};
  for (int seat = 0; seat < static_cast<int>(n_seats); ++seat) {
    ExpertGroup group = {{}, format, {{0, seat - 1}}};
    for (int e = 0; e < in.config.router.n_experts; ++e)
      if (owners[e] == seat) group.experts.push_back(e);
    if (!group.experts.empty()) l.groups.push_back(std::move(group));
  }
  return l;
}

std::vector<LayerExperts> seat_by_use(const PlanInput& in, WeightFormat format,
                                      const std::vector<int>& moe_layers,
                                      const std::vector<ExpertSeat>& seats, double tokens) {
  std::vector<std::vector<double>> uses;
  for (const int l : moe_layers) {
    uses.emplace_back();
    for (int e = 0; e < in.config.router.n_experts; ++e)
      uses.back().push_back(chance_of_use(in.routing.share(l, e), tokens));
  }
  const auto owners = assign_experts(uses, seats);
  std::vector<LayerExperts> layers;
  for (size_t i = 0; i < moe_layers.size(); ++i)
    layers.push_back(seated(in, format, moe_layers[i], seats.size(), owners[i]));
  return layers;
}

// Every layer gets the same part of the seats' room, the first ones what is left over.
std::vector<LayerExperts> seat_alike(const PlanInput& in, WeightFormat format,
                                     const std::vector<int>& moe_layers,
                                     const std::vector<ExpertSeat>& seats, double tokens) {
  const int n_experts = in.config.router.n_experts;
  const std::vector<double> uses(n_experts, chance_of_use(in.routing.share(0, 0), tokens));
  const auto n_layers = static_cast<int64_t>(moe_layers.size());
  std::vector<LayerExperts> layers;
  std::vector<int64_t> before;
  for (int64_t i = 0; i < n_layers; ++i) {
    std::vector<ExpertSeat> part = seats;
    std::vector<int64_t> slots;
    for (size_t s = 1; s < seats.size(); ++s) {
      part[s].slots = seats[s].slots / n_layers + (i < seats[s].slots % n_layers ? 1 : 0);
      slots.push_back(std::min<int64_t>(part[s].slots, n_experts));
    }
    if (i > 0 && slots == before) {
      layers.back().last = moe_layers[i];
      continue;
    }
    before = slots;
    layers.push_back(
        seated(in, format, moe_layers[i], seats.size(), assign_experts({uses}, part)[0]));
  }
  return layers;
}

}  // namespace
}  // namespace tandem
