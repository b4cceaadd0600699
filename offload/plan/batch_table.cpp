#include "offload/plan/batch_table.h"

#include <algorithm>

#include "model/cost.h"
#include "offload/plan/candidates.h"
#include "offload/plan/rates.h"

namespace tandem {
namespace {

constexpr int kMaxBatch = 65'536;

// The device and the format of most of a layer's experts.
struct Owner {
  DeviceId device;
  WeightFormat format;
};

Owner owner_of_most(const LayerExperts& layer) {
  size_t on_cpu = 0, on_gpu = 0;
  for (const ExpertGroup& group : layer.groups)
    (group.owners[0].is_cpu() ? on_cpu : on_gpu) += group.experts.size();
  const auto of_most = std::ranges::find_if(layer.groups, [&](const ExpertGroup& group) {
    return group.owners[0].is_cpu() == (on_cpu >= on_gpu);
  });
  return {of_most->owners[0], of_most->format};
}

double experts_used(const PlanInput& in, int layer, double tokens) {
  double sum = 0;
  for (int e = 0; e < in.config.router.n_experts; ++e) sum += in.routing.chance(layer, e, tokens);
  return sum;
}

// Whether every device has room for the cache of that many sequences.
bool cache_fits(const PlanInput& in, Placement p, int sequences) {
  p.kv_tokens = in.workload.context * sequences_a_replica(p, sequences);
  return std::ranges::all_of(memory_by_device(in.config, in.machine, p),
                             [](const DeviceMemory& m) { return m.free_bytes() >= 0; });
}

}  // namespace

BatchTable batch_table(const PlanInput& in, const Placement& p) {
  const Owner owner = owner_of_most(p.layers.front());
  const Rates rates = rates_of(in.machine, owner.device, p.numa_columns);
  const bool on_gpu = !owner.device.is_cpu();
  const double peak = peak_for(rates, owner.format.dtype, on_gpu);
  const auto expert_bytes = static_cast<double>(routed_expert_bytes(in.config, owner.format));
  BatchTable table{on_gpu, peak / rates.read_bytes_per_second, {}};
  for (int tokens = 1; tokens <= kMaxBatch; tokens *= 2) {
    Workload workload = in.workload;
    workload.concurrency = tokens;
    const PlanInput with = {in.config, in.machine, workload, in.routing};
    const Phase step = predict(with, p).decode;
    BatchRow row{.tokens = static_cast<double>(tokens),
                 .tokens_per_expert = tokens_per_expert(in.config, tokens),
                 .experts_used = experts_used(in, p.layers.front().first, tokens),
                 .step_seconds = step.step_seconds,
                 .tokens_per_second = step.tokens_per_second,
                 .kv_fits = cache_fits(in, p, tokens)};
    const double ops = row.tokens * in.config.router.n_active * token_ops(in.config).expert;
    row.ops_per_byte = ops / (row.experts_used * expert_bytes);
    row.reading = row.ops_per_byte < table.ridge_ops_per_byte;
    const auto longest = std::ranges::max_element(step.moe.parts);
    row.longest = static_cast<Part>(longest - step.moe.parts.begin());
    table.rows.push_back(row);
  }
  return table;
}

}  // namespace tandem
