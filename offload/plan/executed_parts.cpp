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
std::vector<std::vector<int>> ranks_of_experts(const ModelConfig& config, const Placement& p);
GpuParts gpu_parts(const ModelConfig& config, const Placement& p);
DeviceId backbone_of(const Placement& p) { return p.stages.front().devices.front(); }

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
        cpu_format_of_layer(*experts_of_layer(p, l), l, {rank.rank, -1});
    if (format && *format != stored) formats[l] = format;
  }
  // Dense layers, which have no experts, take the format of the next layer.
  for (int l = config.n_layers - 2; l >= 0; --l)
    if (!config.is_moe(l)) formats[l] = formats[l + 1];
  ExecutedParts parts = {
      {std::move(formats), p.numa_columns}, p.kv_tokens, p.kv_type, p.prefill_chunk_tokens, {}};
  if (rank.n_ranks > 1) parts.rank_of_expert = ranks_of_experts(config, p);
  if (backbone_of(p) == kCpu) return parts;
  parts.gpu = gpu_parts(config, p);
  parts.experts.keep_elsewhere({parts.gpu->experts});
  return parts;
}

int n_cpu_ranks(const Placement& p) {
  if (p.stages.size() != 1) return 1;
  const std::vector<DeviceId>& devices = p.stages[0].devices;
  const int n = p.stages[0].tp;
  if (std::ssize(devices) != n) return 1;
  for (int host = 0; host < n; ++host)
    if (devices[host] != DeviceId{host, -1}) return 1;
  return n;
}

bool all_on_gpu(const GpuParts& parts) {
  return std::all_of(parts.experts.begin(), parts.experts.end(), [](const auto& layer) {
    return std::find(layer.begin(), layer.end(), false) == layer.end();
  });
}

GpuParts evenly_on_gpu(const ModelConfig& config, int64_t n_experts) {
  GpuParts parts = {.experts = std::vector<std::vector<bool>>(config.n_all_layers())};
  int64_t n_left = 0;  // layers
  for (int l = 0; l < config.n_all_layers(); ++l) n_left += config.is_moe(l);
  for (int l = 0; l < config.n_all_layers(); ++l) {
    if (!config.is_moe(l)) continue;
    const int64_t n = std::min<int64_t>(ceil_div(n_experts, n_left), config.router.n_experts);
    parts.experts[l].assign(config.router.n_experts, false);
    std::fill_n(parts.experts[l].begin(), n, true);
    n_experts -= n;
    --n_left;
  }
  return parts;
}

namespace {

// Runs before check_placement: a device that this program cannot use is refused as such, whether
// the machine has it or not.
void require_here(const Machine& machine, const Placement& p, PlacedRank rank) {
  const bool has_gpu = !machine.gpus.empty();
  const int n = rank.n_ranks;
  const auto runs_on = [&](DeviceId d) {
    return (d.is_cpu() && d.host < n) || (has_gpu && d == kGpu);
  };
  const std::string known = has_gpu ? fmt::format("{} and {}", device_name(kCpu), device_name(kGpu))
                            : n > 1 ? fmt::format("{} to {}, the CPUs of {} ranks,",
                                                  device_name(kCpu), device_name({n - 1, -1}), n)
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
  const bool divided =
      p.stages.size() == 1 && std::ssize(p.stages[0].devices) == n && p.stages[0].tp == n;
  require(
      divided || n > 1,
      "placement: the backbone is on several devices: this program runs it on one, or on a rank "
      "for each of several hosts (docs/scale_out.md)");
  require(divided,
          "placement: {} ranks divide the backbone: this program runs it on the CPUs of as many "
          "hosts, with tp {}; plan for a machine with hosts: {}, or start as many ranks as the "
          "placement has hosts",
          n, n, n);
  const bool on_gpu = backbone_of(p) == kGpu;
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
      require(group.owners.size() == 1,
              "placement: layer {}: expert {} has {} owners: this program runs it on one device",
              l.first, group.experts.front(), group.owners.size());
      if (group.owners[0].is_cpu()) continue;
      require(on_gpu,
              "placement: layer {}: expert {} is on {} and the backbone is not: this program runs "
              "experts on a GPU beside a backbone there",
              l.first, group.experts.front(), device_name(kGpu));
      require(group.format == stored,
              "placement: layer {}: expert {} is {} on a GPU, which keeps experts as stored, {}",
              l.first, group.experts.front(), format_name(group.format), format_name(stored));
    }
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

std::vector<std::vector<int>> ranks_of_experts(const ModelConfig& config, const Placement& p) {
  return by_expert(config, p, [](DeviceId owner) { return owner.host; });
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

GpuParts gpu_parts(const ModelConfig& config, const Placement& p) {
  return {.embedding_on_cpu = p.embedding_on_cpu,
          .stream_from_tokens = p.stream_from_tokens,
          .micro_batches_from_sequences = p.micro_batches == 2 ? p.micro_batches_from_sequences : 0,
          .experts = by_expert(config, p, [](DeviceId owner) { return owner == kGpu; })};
}

}  // namespace
}  // namespace tandem
