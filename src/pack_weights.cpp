#include "pack_weights.h"

#include <algorithm>

#include "io/load_jobs.h"

namespace tandem {
namespace {

bool is_vector(WeightUse use) { return use == WeightUse::kNorm || use == WeightUse::kRouterBias; }

bool is_table(WeightUse use) { return use == WeightUse::kEmbedding; }

void add_jobs(const QuantView& stored, const QuantView& packed, bool is_table,
              std::vector<PackJob>& jobs) {
  const int64_t rows =
      std::max(rows_per_load_job(stored.q.row_bytes()) / kPackRows, int64_t{1}) * kPackRows;
  for (int64_t first = 0; first < stored.q.rows; first += rows) {
    const int64_t n = std::min(rows, stored.q.rows - first);
    jobs.push_back(
        {packed, first, n, stored.q.row_data(first), n * stored.q.row_bytes(), is_table});
  }
}

}  // namespace

PackedModel reserve_packed(ModelWeights& stored, const ModelConfig& config, CpuWeights& home) {
  int64_t bytes = 0;
  std::vector<std::pair<WeightUse, QuantView>> sources;
  for_each_weight(stored, config, [&](const WeightSpec& spec, QuantView& w) {
    sources.push_back({spec.use, w});
    bytes += is_vector(spec.use)  ? CpuWeights::vector_bytes(w)
             : is_table(spec.use) ? CpuWeights::table_bytes(w)
                                  : home.packed_bytes(w);
  });
  if (config.tied_head) bytes += home.packed_bytes(stored.embed);
  home.allocate(bytes);

  PackedModel model;
  auto source = sources.begin();
  for_each_weight(model.weights, config, [&](const WeightSpec&, QuantView& slot) {
    const auto& [use, w] = *source++;
    slot = is_vector(use)  ? home.keep_vector(w)
           : is_table(use) ? home.reserve_table(w)
                           : home.reserve(w);
    if (!is_vector(use)) add_jobs(w, slot, is_table(use), model.jobs);
  });
  if (config.tied_head) {
    model.weights.head = home.reserve(stored.embed);
    add_jobs(stored.embed, model.weights.head, false, model.jobs);
  }
  return model;
}

}  // namespace tandem
