#include "offload/plan/executed_parts.h"

#include <algorithm>

#include "core/check.h"
#include "core/rounding.h"
#include "model/cost.h"

namespace tandem {
namespace {

constexpr DeviceId kCpu{}, kGpu{0, 0};

void require_here(const Machine& machine, const Placement& p, PlacedRank rank);
void require_executed(const ModelConfig& config, const Placement& p, PlacedRank rank);
std::optional<WeightFormat> cpu_format_of_layer(const LayerExperts& experts, int layer,
                                                DeviceId cpu);
bool is_sliced(const Placement& p);
std::vector<std::vector<int>> ranks_of_experts(const ModelConfig& config, const Placement& p,
                                               PlacedRank rank);
GpuParts gpu_parts(const ModelConfig& config, const Placement& p, PlacedRank rank,
                   const std::vector<std::vector<int>>& rank_of_expert);
DeviceId backbone_of(const Placement& p, PlacedRank rank) {
  return p.stages.front().devices[rank.rank];
}

}  // namespace

ExecutedParts executed_parts(const ModelConfig& config, const Machine& machine, const Placement& p,
                             PlacedRank rank) {
  require_here(machine, p, rank);
  check_placement(config, machine, p);
  require_executed(config, p, rank);
  const WeightFormat stored = stored_expert_format(config);
  std::vector<std::optional<WeightFormat>> formats(config.n_layers);
  for (int l = 0; l < config.n_layers; ++l) {
    if (!config.is_moe(l)) continue;
    const std::optional<WeightFormat> format =
        cpu_format_of_layer(*experts_of_layer(p, l), l, {backbone_of(p, rank).host, -1});
    if (format && *format != stored) formats[l] = format;
  }
  // Dense layers, which have no experts, take the format of the next layer.
  for (int l = config.n_layers - 2; l >= 0; --l)
    if (!config.is_moe(l)) formats[l] = formats[l + 1];
  ExecutedParts parts = {
      {std::move(formats), p.numa_columns}, p.kv_tokens, p.kv_type, p.prefill_chunk_tokens, {}};
  parts.grid = {p.stages[0].dp(), p.stages[0].tp};
  if (rank.n_ranks > 1 && !is_sliced(p)) parts.rank_of_expert = ranks_of_experts(config, p, rank);
  if (backbone_of(p, rank).is_cpu()) return parts;
  parts.gpu = gpu_parts(config, p, rank, parts.rank_of_expert);
  parts.experts.keep_elsewhere(beside_cpu(*parts.gpu));
  return parts;
}

int n_ranks_of(const Placement& p) {
  if (p.stages.size() != 1) return 1;
  const std::vector<DeviceId>& devices = p.stages[0].devices;
  const auto n = static_cast<int>(devices.size());
  if (devices[0].host != 0) return 1;
  const auto n_of_host = static_cast<int>(
      std::count_if(devices.begin(), devices.end(), [](DeviceId d) { return d.host == 0; }));
  for (int rank = 0; rank < n; ++rank) {
    const int gpu = devices[0].is_cpu() ? -1 : rank % n_of_host;
    if (devices[rank] != DeviceId{rank / n_of_host, gpu}) return 1;
  }
  return n;
}

bool all_on_gpu(const GpuParts& parts) {
  const auto beside = beside_cpu(parts).experts;
  return std::all_of(beside.begin(), beside.end(), [](const auto& layer) {
    return std::find(layer.begin(), layer.end(), false) == layer.end();
  });
}

Elsewhere beside_cpu(const GpuParts& parts) {
  Elsewhere elsewhere = {parts.experts};
  for (size_t l = 0; l < parts.on_other_ranks.size(); ++l)
    for (size_t e = 0; e < parts.on_other_ranks[l].size(); ++e)
      if (parts.on_other_ranks[l][e]) elsewhere.experts[l][e] = true;
  return elsewhere;
}

GpuParts evenly_on_gpu(const ModelConfig& config, int64_t n_experts,
                       std::vector<std::vector<bool>> on_other_ranks) {
  GpuParts parts = {.experts = std::vector<std::vector<bool>>(config.n_all_layers())};
  parts.on_other_ranks = std::move(on_other_ranks);
  int64_t n_left = 0;  // layers
  for (int l = 0; l < config.n_all_layers(); ++l) n_left += config.is_moe(l);
  for (int l = 0; l < config.n_all_layers(); ++l) {
    if (!config.is_moe(l)) continue;
    std::vector<bool>& layer = parts.experts[l];
    layer.assign(config.router.n_experts, false);
    int64_t n = ceil_div(n_experts, n_left--);
    for (int e = 0; e < config.router.n_experts && n > 0; ++e) {
      if (!parts.on_other_ranks.empty() && parts.on_other_ranks[l][e]) continue;
      layer[e] = true;
      --n;
      --n_experts;
    }
  }
  return parts;
}

namespace {

// Runs before check_placement: a device that this program cannot use is refused as such, whether
// the machine has it or not.
void require_here(const Machine& machine, const Placement& p, PlacedRank rank) {
  const int n = rank.n_ranks;
  const int n_gpus = std::min(static_cast<int>(machine.gpus.size()), rank.n_of_host);  // of a host
  const int n_hosts = n_gpus > 0 ? std::max(n / rank.n_of_host, 1) : n;
  const auto runs_on = [&](DeviceId d) { return d.host < n_hosts && d.gpu < n_gpus; };
  const std::string known =
      n_gpus > 0 && n > 1
          ? fmt::format("the CPUs and the first {} GPUs of {} hosts", n_gpus, n_hosts)
      : n_gpus > 0 ? fmt::format("{} and {}", device_name(kCpu), device_name(kGpu))
      : n > 1      ? fmt::format("{} to {}, the CPUs of {} ranks,", device_name(kCpu),
                                 device_name({n - 1, -1}), n)
                   : device_name(kCpu);
  for (const Stage& s : p.stages)
    for (const DeviceId d : s.devices)
      require(runs_on(d),
              "placement: layers {}-{} of the backbone are on {}: this program runs them on {} "
              "only{} (`tandem plan --placement` assesses other places)",
              s.first, s.last, device_name(d), known, d == kGpu ? ", or with --device cuda" : "");
  for (const LayerExperts& l : p.layers)
    for (const ExpertGroup& group : l.groups)
      for (const DeviceId d : group.owners)
        require(runs_on(d),
                "placement: layer {}: expert {} is on {}: this program runs experts on {} only{} "
                "(`tandem plan --placement` assesses other places)",
                l.first, group.experts.empty() ? 0 : group.experts.front(), device_name(d), known,
                d == kGpu ? ", or with --device cuda" : "");
}

void require_executed(const ModelConfig& config, const Placement& p, PlacedRank rank) {
  require(p.backbone == stored_format(config),
          "placement: the backbone is {}: this program keeps it as stored, {}",
          format_name(p.backbone), format_name(stored_format(config)));
  const int n = rank.n_ranks;
  const bool divided = p.stages.size() == 1 && std::ssize(p.stages[0].devices) == n;
  require(
      divided || n > 1,
      "placement: the backbone is on several devices: this program runs it on one, or on a rank "
      "for each of several hosts (docs/scale_out.md)");
  require(divided,
          "placement: {} ranks have the backbone: this program runs it on the CPUs of as many "
          "hosts; plan for a machine with hosts: {}, or start as many ranks as the placement has "
          "hosts",
          n, n);
  require(n == 1 || n_ranks_of(p) == n,
          "placement: the backbone is on {}, .. in an order of its own: with {} ranks, rank r has "
          "the r-th device of the hosts in their order",
          device_name(backbone_of(p, {})), n);
  const bool on_gpu = !backbone_of(p, rank).is_cpu();
  const int n_replicas = p.stages[0].dp();
  require(n_replicas == 1 || p.head_replicated,
          "placement: {} replicas of the backbone share one head: this program keeps the head with "
          "each; set replicated of the head",
          n_replicas);
  require(!on_gpu || n == 1 || p.micro_batches == 1,
          "placement: micro_batches is {}: several ranks compute one at a time; set it to 1",
          p.micro_batches);
  require(!on_gpu || !p.head_on_cpu,
          "placement: the head is on the CPU and the backbone on a GPU: this program runs them on "
          "one device");
  require(on_gpu || p.stream_from_tokens == 0,
          "placement: stream_from_tokens is {}: there is no GPU to stream experts to; set it to 0",
          p.stream_from_tokens);
  require(on_gpu || p.micro_batches == 1,
          "placement: micro_batches is {}: there is no GPU that the CPU could overlap with; set it "
          "to 1",
          p.micro_batches);
  const WeightFormat stored = stored_expert_format(config);
  for (const LayerExperts& l : p.layers)
    for (const ExpertGroup& group : l.groups) {
      if (group.sliced)
        require(n > 1 && on_gpu && group.owners == p.stages[0].devices &&
                    std::ssize(group.experts) == config.router.n_experts,
                "placement: layer {}: expert {} is sliced: this program slices all experts of all "
                "layers, among the GPUs that divide the backbone, or none",
                l.first, group.experts.front());
      else
        require(group.owners.size() == 1,
                "placement: layer {}: expert {} has {} owners: this program runs it on one device",
                l.first, group.experts.front(), group.owners.size());
      require(group.sliced == is_sliced(p),
              "placement: layer {}: expert {} is {} and others are not: this program slices all "
              "experts or none",
              l.first, group.experts.front(), group.sliced ? "sliced" : "whole");
      if (group.owners[0].is_cpu()) continue;
      require(on_gpu,
              "placement: layer {}: expert {} is on {} and the backbone is not: this program runs "
              "experts on a GPU beside a backbone there",
              l.first, group.experts.front(), device_name(group.owners[0]));
      require(group.format == stored,
              "placement: layer {}: expert {} is {} on a GPU, which keeps experts as stored, {}",
              l.first, group.experts.front(), format_name(group.format), format_name(stored));
    }
}

// Whether devices have slices of experts, as its first layer says.
bool is_sliced(const Placement& p) {
  return !p.layers.empty() && !p.layers[0].groups.empty() && p.layers[0].groups[0].sliced;
}

// [n_all_layers][n_experts] of(owner) for each expert, empty for a dense layer. Layers for
// multi-token prediction, which a placement does not list, are like the last layer.
template <class Of>
auto by_expert(const ModelConfig& config, const Placement& p, Of of) {
  std::vector<std::vector<decltype(of(kCpu))>> all(config.n_all_layers());
  for (int l = 0; l < config.n_layers; ++l) {
    if (!config.is_moe(l)) continue;
    all[l].resize(config.router.n_experts);
    for (const ExpertGroup& group : experts_of_layer(p, l)->groups)
      for (const int e : group.experts) all[l][e] = of(group.owners[0]);
  }
  for (int l = config.n_layers; l < config.n_all_layers(); ++l) all[l] = all[config.n_layers - 1];
  return all;
}

// The ranks of a host deal the experts of its CPUs among themselves.
std::vector<std::vector<int>> ranks_of_experts(const ModelConfig& config, const Placement& p,
                                               PlacedRank rank) {
  const std::vector<DeviceId>& devices = p.stages.front().devices;
  auto ranks = by_expert(config, p, [&](DeviceId owner) {
    const auto at = std::find(devices.begin(), devices.end(), owner);
    return at == devices.end() ? -1 - owner.host : static_cast<int>(at - devices.begin());
  });
  for (std::vector<int>& layer : ranks) {
    std::vector<int> n_dealt(rank.n_ranks);  // of each host
    for (int& r : layer) {
      if (r >= 0) continue;
      const int host = -1 - r;
      r = host * rank.n_of_host + n_dealt[host]++ % rank.n_of_host;
    }
  }
  return ranks;
}

// The format of the layer's experts on these CPUs; empty if there are none.
std::optional<WeightFormat> cpu_format_of_layer(const LayerExperts& experts, int layer,
                                                DeviceId cpu) {
  const ExpertGroup* first = nullptr;
  for (const ExpertGroup& group : experts.groups) {
    if (group.owners[0] != cpu) continue;
    if (!first) first = &group;
    require(group.format == first->format,
            "placement: layer {}: expert {} is {} and expert {} is {}: this program keeps all "
            "experts of a layer in one format",
            layer, first->experts.front(), format_name(first->format), group.experts.front(),
            format_name(group.format));
  }
  return first ? first->format : std::optional<WeightFormat>();
}

GpuParts gpu_parts(const ModelConfig& config, const Placement& p, PlacedRank rank,
                   const std::vector<std::vector<int>>& rank_of_expert) {
  const DeviceId gpu = backbone_of(p, rank);
  std::vector<std::vector<bool>> on_other_ranks;
  for (const std::vector<int>& layer : rank_of_expert) {
    std::vector<bool>& others = on_other_ranks.emplace_back();
    for (const int r : layer) others.push_back(r != rank.rank);
  }
  std::optional<Slice> expert_columns;
  if (is_sliced(p)) {
    const int64_t n = config.expert_dim / rank.n_ranks;
    expert_columns = {rank.rank * n, n};
  }
  return {.embedding_on_cpu = p.embedding_on_cpu,
          .stream_from_tokens = p.stream_from_tokens,
          .micro_batches_from_sequences = p.micro_batches == 2 ? p.micro_batches_from_sequences : 0,
          .experts =
              by_expert(config, p, [&](DeviceId owner) { return expert_columns || owner == gpu; }),
          .on_other_ranks = std::move(on_other_ranks),
          .expert_columns = expert_columns};
}

}  // namespace
}  // namespace tandem
