#include "pack_weights.h"

#include <algorithm>

#include "io/load_jobs.h"

namespace tandem {
namespace {

bool is_vector(WeightUse use) { return use == WeightUse::kNorm || use == WeightUse::kRouterBias; }

void add_jobs(PackJob::Way way, const QuantView& stored, const QuantView& packed,
              std::vector<PackJob>& jobs) {
  const int64_t rows =
      std::max(rows_per_load_job(stored.q.row_bytes()) / kPackRows, int64_t{1}) * kPackRows;
  for (int64_t first = 0; first < stored.q.rows; first += rows) {
    const int64_t n = std::min(rows, stored.q.rows - first);
    jobs.push_back(
        {way, stored, packed, first, n, stored.q.row_data(first), n * stored.q.row_bytes()});
  }
}

}  // namespace

PackedModel reserve_packed(ModelWeights& stored, const ModelConfig& config, CpuWeights& home,
                           std::optional<WeightFormat> experts) {
  using Way = PackJob::Way;
  const auto way_of = [&](WeightUse use, const QuantView& w) {
    if (use == WeightUse::kEmbedding) return Way::kTable;
    const bool converts = use == WeightUse::kExpert && experts && experts->dtype != w.q.dtype;
    return converts ? Way::kConvert : Way::kPack;
  };
  struct Source {
    WeightUse use;
    QuantView w;
  };
  std::vector<Source> sources;
  int64_t bytes = config.tied_head ? home.packed_bytes(stored.embed) : 0;
  for_each_weight(stored, config, [&](const WeightSpec& spec, QuantView& w) {
    sources.push_back({spec.use, w});
    const Way way = way_of(spec.use, w);
    bytes += is_vector(spec.use)    ? CpuWeights::vector_bytes(w)
             : way == Way::kTable   ? CpuWeights::table_bytes(w)
             : way == Way::kConvert ? home.converted_bytes(w, *experts)
                                    : home.packed_bytes(w);
  });
  home.allocate(bytes);

  PackedModel model;
  auto source = sources.begin();
  for_each_weight(model.weights, config, [&](const WeightSpec&, QuantView& slot) {
    const auto& [use, w] = *source++;
    if (is_vector(use)) {
      slot = home.keep_vector(w);
      return;
    }
    const Way way = way_of(use, w);
    slot = way == Way::kTable     ? home.reserve_table(w)
           : way == Way::kConvert ? home.reserve_converted(w, *experts)
                                  : home.reserve(w);
    add_jobs(way, w, slot, model.jobs);
  });
  if (config.tied_head) {
    model.weights.head = home.reserve(stored.embed);
    add_jobs(Way::kPack, stored.embed, model.weights.head, model.jobs);
  }
  return model;
}

}  // namespace tandem
