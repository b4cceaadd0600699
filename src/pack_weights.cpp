#include "pack_weights.h"

#include <algorithm>
#include <cstring>

#include "io/packed_header.h"
#include "model/checkpoint.h"

namespace tandem {
namespace {

using Way = PackedMatrix::Way;

Way way_of(WeightUse use, const QuantView& w, std::optional<WeightFormat> experts) {
  if (use == WeightUse::kEmbedding) return Way::kTable;
  const bool converts = use == WeightUse::kExpert && experts && experts->dtype != w.q.dtype;
  if (converts) return Way::kConvert;
  return w.q.dtype == DType::kI4Words ? Way::kPackWords : Way::kPack;
}

int64_t rows_of_job(const PackedMatrix& m) {
  return std::max(rows_per_load_job(m.stored.q.row_bytes()) / kPackRows, int64_t{1}) * kPackRows;
}

// `data`: rows of m.stored from first_row on, as many as a job has.
void pack_rows(const CpuWeights& home, const PackedMatrix& m, int64_t first_row,
               const std::byte* data) {
  const int64_t n = std::min(rows_of_job(m), m.stored.q.rows - first_row);
  switch (m.way) {
    case Way::kTable:
      std::memcpy(m.packed.q.row_data(first_row), data, n * m.stored.q.row_bytes());
      break;
    case Way::kPack:
      home.pack(data, m.packed, first_row, n);
      break;
    case Way::kPackWords:
      home.pack_words(data, m.packed, first_row, n);
      break;
    case Way::kConvert:
      home.convert(data, m.stored, m.packed, first_row, n);
      break;
  }
}

void pack_scales(const CpuWeights& home, const PackedMatrix& m, const std::byte* data) {
  TensorView scales = m.stored.scale;
  scales.data = const_cast<std::byte*>(data);
  check_scales(m.name + (m.stored.q.dtype == DType::kI4Words ? kInt4Parts[1] : "_scale_inv"),
               scales);
  if (m.way == Way::kPack) CpuWeights::pack_scales(data, m.packed);
  if (m.way == Way::kPackWords) home.pack_words_scales(data, m.packed);
}

// A view in which offsets stand for addresses; -1: there is none.
struct StoredView {
  int64_t at, rows, cols, stride, dtype;
};
struct StoredWeight {
  StoredView q, scale;
  int64_t block_rows, block_cols, row0, col0;
};

// Every matrix and vector, the tied head included, in one order.
template <class Visit>
void for_each_packed(ModelWeights& weights, const ModelConfig& config, Visit visit) {
  for_each_weight(weights, config, visit);
  if (config.tied_head)
    visit(WeightSpec{"lm_head.weight", -1, -1, WeightUse::kHead, config.vocab, config.dim},
          weights.head);
}

StoredView stored_view(const TensorView& view, std::span<const std::byte> home) {
  if (view.empty()) return {-1, 0, 0, 0, 0};
  return {static_cast<const std::byte*>(view.data) - home.data(), view.rows, view.cols, view.stride,
          static_cast<int64_t>(view.dtype)};
}

// `rows_of_stride`: rows that lie in one stride.
TensorView view_of(const StoredView& stored, std::span<std::byte> home, int64_t rows_of_stride) {
  if (stored.at == -1) return {};
  const auto bytes = static_cast<int64_t>(home.size());
  const bool typed = stored.dtype >= 0 && stored.dtype <= static_cast<int64_t>(DType::kI4);
  const auto dtype = typed ? static_cast<DType>(stored.dtype) : DType::kI4;
  const int64_t n_strides =
      stored.rows / rows_of_stride + (stored.rows % rows_of_stride > 0 ? 1 : 0);
  require_sound(typed && stored.at >= 0 && stored.at <= bytes && stored.cols > 0 && n_strides > 0 &&
                    stored.stride >= stored.cols &&
                    stored.stride <= (bytes - stored.at) / n_strides * 8 / bits_of(dtype),
                "its manifest places a weight outside of its {} bytes", bytes);
  return {home.data() + stored.at, stored.rows, stored.cols, stored.stride, dtype};
}

}  // namespace

int64_t packed_bytes(ModelWeights& stored, const ModelConfig& config, const CpuWeights& home,
                     std::optional<WeightFormat> experts) {
  int64_t bytes = config.tied_head ? home.packed_bytes(stored.embed) : 0;
  for_each_weight(stored, config, [&](const WeightSpec& spec, QuantView& w) {
    const Way way = way_of(spec.use, w, experts);
    bytes += is_vector(spec.use)    ? CpuWeights::vector_bytes(w)
             : way == Way::kTable   ? CpuWeights::table_bytes(w)
             : way == Way::kConvert ? home.converted_bytes(w, *experts)
                                    : home.packed_bytes(w);
  });
  return bytes;
}

PackJobs load_jobs(const PackedModel& model, const CpuWeights& home) {
  PackJobs jobs;
  for (const PackedMatrix& m : model.matrices) {
    const TensorView &q = m.stored.q, &scale = m.stored.scale;
    for (int64_t first = 0; first < q.rows; first += rows_of_job(m))
      jobs.rest.push_back(
          {q.row_data(first), std::min(rows_of_job(m), q.rows - first) * q.row_bytes(),
           [&home, &m, first](const std::byte* data) { pack_rows(home, m, first, data); }});
    if (scale.empty()) continue;
    std::vector<LoadJob>& when = m.way == Way::kPackWords ? jobs.first : jobs.rest;
    when.push_back({scale.row_data(0), scale.rows * scale.row_bytes(),
                    [&home, &m](const std::byte* data) { pack_scales(home, m, data); }});
  }
  return jobs;
}

PackedModel reserve_packed(ModelWeights& stored, const ModelConfig& config, CpuWeights& home,
                           std::optional<WeightFormat> experts) {
  home.allocate(packed_bytes(stored, config, home, experts));
  struct Source {
    WeightUse use;
    QuantView w;
  };
  std::vector<Source> sources;
  for_each_weight(stored, config, [&](const WeightSpec& spec, QuantView& w) {
    sources.push_back({spec.use, w});
  });

  PackedModel model;
  auto source = sources.begin();
  for_each_weight(model.weights, config, [&](const WeightSpec& spec, QuantView& slot) {
    const auto& [use, w] = *source++;
    if (is_vector(use)) {
      slot = home.keep_vector(w);
      return;
    }
    const Way way = way_of(use, w, experts);
    slot = way == Way::kTable     ? home.reserve_table(w)
           : way == Way::kConvert ? home.reserve_converted(w, *experts)
                                  : home.reserve(w);
    model.matrices.push_back({way, spec.name, w, slot});
  });
  if (config.tied_head) {
    model.weights.head = home.reserve(stored.embed);
    model.matrices.push_back({Way::kPack, "lm_head.weight", stored.embed, model.weights.head});
  }
  return model;
}

std::string manifest_of(const ModelWeights& packed, const ModelConfig& config,
                        std::span<const std::byte> home) {
  std::string manifest;
  ModelWeights weights = packed;
  for_each_packed(weights, config, [&](const WeightSpec&, const QuantView& w) {
    const StoredWeight stored = {stored_view(w.q, home),
                                 stored_view(w.scale, home),
                                 w.block_rows,
                                 w.block_cols,
                                 w.row0,
                                 w.col0};
    manifest.append(reinterpret_cast<const char*>(&stored), sizeof stored);
  });
  return manifest;
}

ModelWeights weights_of(std::string_view manifest, const ModelConfig& config,
                        std::span<std::byte> home, cpu::Layout layout) {
  ModelWeights weights;
  for_each_packed(weights, config, [&](const WeightSpec& spec, QuantView& w) {
    StoredWeight stored;
    require_sound(manifest.size() >= sizeof stored, "its manifest ends before {}", spec.name);
    std::memcpy(&stored, manifest.data(), sizeof stored);
    manifest.remove_prefix(sizeof stored);
    require_sound(stored.q.at >= 0 && stored.q.rows == spec.rows && stored.q.cols == spec.cols,
                  "its manifest has another shape of {}", spec.name);
    const bool in_panels =
        layout == cpu::Layout::kPanels && !is_vector(spec.use) && spec.use != WeightUse::kEmbedding;
    w = {.q = view_of(stored.q, home, in_panels ? kPackRows : 1),
         .scale = view_of(stored.scale, home, 1),
         .block_rows = static_cast<int>(stored.block_rows),
         .block_cols = static_cast<int>(stored.block_cols),
         .row0 = static_cast<int>(stored.row0),
         .col0 = static_cast<int>(stored.col0)};
  });
  require_sound(manifest.empty(), "its manifest has more than the model");
  return weights;
}

}  // namespace tandem
