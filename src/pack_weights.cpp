#include "pack_weights.h"

#include <algorithm>

#include "io/load_jobs.h"

namespace tandem {
namespace {

bool is_vector(WeightUse use) { return use == WeightUse::kNorm || use == WeightUse::kRouterBias; }

void add_jobs(const QuantView& stored, const QuantView& packed, std::vector<PackJob>& jobs) {
  const int64_t rows = rows_per_load_job(stored.q.row_bytes());
  for (int64_t first = 0; first < stored.q.rows; first += rows) {
    const int64_t n = std::min(rows, stored.q.rows - first);
    jobs.push_back({packed, first, n, stored.q.row_data(first), n * stored.q.row_bytes()});
  }
}

}  // namespace

PackedModel reserve_packed(ModelWeights& stored, const ModelConfig& config, CpuWeights& home) {
  int64_t bytes = 0;
  std::vector<std::pair<WeightUse, QuantView>> sources;
  for_each_weight(stored, config, [&](const WeightSpec& spec, QuantView& w) {
    sources.push_back({spec.use, w});
    bytes += is_vector(spec.use) ? CpuWeights::vector_bytes(w) : CpuWeights::packed_bytes(w);
  });
  home.allocate(bytes);

  PackedModel model;
  auto source = sources.begin();
  for_each_weight(model.weights, config, [&](const WeightSpec&, QuantView& slot) {
    const auto& [use, w] = *source++;
    slot = is_vector(use) ? home.keep_vector(w) : home.reserve(w);
    if (!is_vector(use)) add_jobs(w, slot, model.jobs);
  });
  if (config.tied_head) model.weights.head = model.weights.embed;
  return model;
}

}  // namespace tandem
