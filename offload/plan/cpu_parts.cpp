#include "offload/plan/cpu_parts.h"

#include "core/check.h"
#include "offload/plan/cost.h"

namespace tandem {
namespace {

constexpr Device kHere{};

void require_here(const Placement& p);
void require_executed(const ModelConfig& config, const Placement& p);
WeightFormat format_of_layer(const LayerExperts& experts, int layer);

}  // namespace

CpuParts cpu_parts(const ModelConfig& config, const Machine& machine, const Placement& p) {
  require_here(p);
  check_placement(config, machine, p);
  require_executed(config, p);
  const WeightFormat stored = stored_expert_format(config);
  std::vector<std::optional<WeightFormat>> formats(config.n_layers);
  for (int l = 0; l < config.n_layers; ++l) {
    if (!config.is_moe(l)) continue;
    const WeightFormat format = format_of_layer(*experts_of_layer(p, l), l);
    if (format != stored) formats[l] = format;
  }
  // Dense layers, which have no experts, as the layers after them.
  for (int l = config.n_layers - 2; l >= 0; --l)
    if (!config.is_moe(l)) formats[l] = formats[l + 1];
  return {{std::move(formats), p.numa_columns}, p.kv_tokens, p.prefill_chunk_tokens};
}

namespace {

// Before anything is said of devices that this machine may have.
void require_here(const Placement& p) {
  for (const Stage& s : p.stages)
    for (const Device d : s.devices)
      require(d == kHere,
              "placement: layers {}-{} of the backbone are on {}: this program runs them on {} "
              "only (`tandem plan --placement` assesses other places)",
              s.first, s.last, device_name(d), device_name(kHere));
  for (const LayerExperts& l : p.layers)
    for (const ExpertGroup& group : l.groups)
      for (const Device d : group.owners)
        require(d == kHere,
                "placement: layer {}: expert {} is on {}: this program runs experts on {} only "
                "(`tandem plan --placement` assesses other places)",
                l.first, group.experts.empty() ? 0 : group.experts.front(), device_name(d),
                device_name(kHere));
}

void require_executed(const ModelConfig& config, const Placement& p) {
  require(p.backbone == stored_format(config),
          "placement: the backbone is {}: this program keeps it as stored, {}",
          format_name(p.backbone), format_name(stored_format(config)));
  require(p.stream_from_tokens == 0,
          "placement: stream_from_tokens is {}: there is no GPU to bring experts to; make it 0",
          p.stream_from_tokens);
  require(p.micro_batches == 1,
          "placement: micro_batches is {}: this program overlaps none; make it 1", p.micro_batches);
}

WeightFormat format_of_layer(const LayerExperts& experts, int layer) {
  const ExpertGroup& first = experts.groups.front();
  for (const ExpertGroup& group : experts.groups)
    require(group.format == first.format,
            "placement: layer {}: expert {} is {} and expert {} is {}: this program keeps all "
            "experts of a layer in one format",
            layer, first.experts.front(), format_name(first.format), group.experts.front(),
            format_name(group.format));
  return first.format;
}

}  // namespace
}  // namespace tandem
