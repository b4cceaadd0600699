#include "loader/weights/pack_weights.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "io/packed_header.h"
#include "model/checkpoint.h"

namespace tandem {
namespace {

using Way = PackedMatrix::Way;

Way way_of(const WeightSpec& spec, const QuantView& w, const ExpertsLayout& experts) {
  if (spec.use == WeightUse::kEmbedding) return Way::kTable;
  if (spec.use == WeightUse::kExpert) {
    const std::optional<WeightFormat>& format = experts.format(spec.layer);
    if (format && format->dtype != w.q.dtype) return Way::kConvert;
  }
  return w.q.dtype == DType::kI4Words ? Way::kPackWords : Way::kPack;
}

int64_t rows_of_job(const PackedMatrix& m) {
  return std::max(rows_per_load_job(m.stored.q.row_bytes()) / kPackRows, int64_t{1}) * kPackRows;
}

// Rows of `row_bytes`, `stride` bytes apart, as contiguous rows: in place, or copied to `room`.
const std::byte* dense(const std::byte* from, int64_t stride, int64_t n_rows, int64_t row_bytes,
                       std::vector<std::byte>& room) {
  if (row_bytes == stride) return from;
  room.resize(n_rows * row_bytes);
  for (int64_t r = 0; r < n_rows; ++r)
    std::memcpy(room.data() + r * row_bytes, from + r * stride, row_bytes);
  return room.data();
}

int64_t dense_row_bytes(const TensorView& view) { return view.cols * bits_of(view.dtype) / 8; }

// `data`: rows of m.stored from first_row on, as many as one job packs.
void pack_rows(const CpuWeights& home, const PackedMatrix& m, int64_t first_row,
               const std::byte* data) {
  const int64_t end = std::min(first_row + rows_of_job(m), m.stored.q.rows);
  const int64_t stride = m.stored.q.row_bytes();
  std::vector<std::byte> room;
  for (const PackedMatrix::Part& part : m.parts) {
    const TensorView& q = part.stored.q;
    const int64_t begin = std::max(first_row, part.first_row);
    const int64_t n = std::min(end, part.first_row + q.rows) - begin;
    if (n <= 0) continue;
    const int64_t row = begin - part.first_row;  // row of the part
    const std::byte* const from = data + (q.row_data(row) - m.stored.q.row_data(first_row));
    if (m.way == Way::kConvert) {
      home.convert(from, part.stored, part.packed, row, n);
      continue;
    }
    const int64_t row_bytes = dense_row_bytes(q);
    const std::byte* const rows = dense(from, stride, n, row_bytes, room);
    if (m.way == Way::kTable) std::memcpy(part.packed.q.row_data(row), rows, n * row_bytes);
    if (m.way == Way::kPack) home.pack(rows, part.packed, row, n);
    if (m.way == Way::kPackWords) home.pack_words(rows, part.packed, row, n);
  }
}

void pack_scales(const CpuWeights& home, const PackedMatrix& m, const std::byte* data) {
  TensorView scales = m.stored.scale;
  scales.data = const_cast<std::byte*>(data);
  check_scales(m.name + (m.stored.q.dtype == DType::kI4Words ? kInt4Parts[1] : "_scale_inv"),
               scales);
  std::vector<std::byte> room;
  for (const PackedMatrix::Part& part : m.parts) {
    const TensorView& of_part = part.stored.scale;
    const std::byte* const from =
        dense(data + (of_part.row_data(0) - m.stored.scale.row_data(0)), scales.row_bytes(),
              of_part.rows, dense_row_bytes(of_part), room);
    if (m.way == Way::kPack) CpuWeights::pack_scales(from, part.packed);
    if (m.way == Way::kPackWords) home.pack_words_scales(from, part.packed);
  }
}

// A view with an offset instead of an address; -1: empty.
struct StoredView {
  int64_t at, rows, cols, stride, dtype;
};
struct StoredWeight {
  StoredView q, scale;
  int64_t block_rows, block_cols, row0, col0;
};

// Visits every kept matrix and vector, including a tied head, in a fixed order.
template <class Visit>
void for_each_packed(ModelWeights& weights, const ModelConfig& config, const ExpertsLayout& experts,
                     Visit visit) {
  const auto visit_kept = [&](const WeightSpec& spec, QuantView& slot) {
    if (experts.keeps(spec)) visit(spec, slot);
  };
  for_each_weight(weights, config, visit_kept);
  if (!config.tied_head) return;
  const BackboneShare share = weights.share_of(config);
  const Slice rows = share.head();
  if (rows.n > 0 && share.is_last_stage(config))
    visit_kept(WeightSpec{"lm_head.weight", -1, -1, WeightUse::kHead, rows.n, config.dim, 0, 0,
                          rows.first, 0},
               weights.head);
}

StoredView stored_view(const TensorView& view, std::span<const std::byte> region) {
  if (view.empty()) return {-1, 0, 0, 0, 0};
  return {static_cast<const std::byte*>(view.data) - region.data(), view.rows, view.cols,
          view.stride, static_cast<int64_t>(view.dtype)};
}

// `rows_of_stride`: rows that share one stride.
TensorView view_of(const StoredView& stored, std::span<std::byte> region, int64_t rows_of_stride) {
  if (stored.at == -1) return {};
  const int64_t bytes = std::ssize(region);
  const bool typed = stored.dtype >= 0 && stored.dtype <= static_cast<int64_t>(DType::kI4TwoLevel);
  const auto dtype = typed ? static_cast<DType>(stored.dtype) : DType::kI4TwoLevel;
  const int64_t n_strides =
      stored.rows / rows_of_stride + (stored.rows % rows_of_stride > 0 ? 1 : 0);
  require_sound(typed && stored.at >= 0 && stored.at <= bytes && stored.cols > 0 && n_strides > 0 &&
                    stored.stride >= stored.cols &&
                    stored.stride <= (bytes - stored.at) / n_strides * 8 / bits_of(dtype),
                "its manifest places a weight outside of its {} bytes", bytes);
  return {region.data() + stored.at, stored.rows, stored.cols, stored.stride, dtype};
}

// A manifest begins with the sizes of all regions.
int64_t region_table_bytes(const CpuWeights& home) {
  return home.n_regions() * static_cast<int64_t>(sizeof(int64_t));
}

// Bytes of a packed weight.
int64_t bytes_of(const WeightSpec& spec, const QuantView& stored, const CpuWeights& home,
                 const ExpertsLayout& experts) {
  if (is_vector(spec.use)) return CpuWeights::vector_bytes(stored);
  switch (way_of(spec, stored, experts)) {
    case Way::kTable:
      return CpuWeights::table_bytes(stored);
    case Way::kPack:
    case Way::kPackWords:
      return home.packed_bytes(stored);
    case Way::kConvert:
      return home.converted_bytes(stored, *experts.format(spec.layer));
  }
  return 0;
}

// The whole matrices and vectors of `stored`, of which a home keeps parts.
class Sources {
 public:
  Sources(ModelWeights& stored, const ModelConfig& config, const ExpertsLayout& experts) {
    for_each_packed(stored, config, experts,
                    [&](const WeightSpec& spec, QuantView& w) { all_[spec.name] = w; });
  }
  const QuantView& whole(const WeightSpec& spec) const { return all_.at(spec.name); }
  QuantView part(const WeightSpec& spec) const { return part_of(spec, whole(spec)); }

 private:
  std::unordered_map<std::string, QuantView> all_;
};

QuantView reserve_matrix(const WeightSpec& spec, const QuantView& part, Way way,
                         const ExpertsLayout& experts, CpuWeights& home) {
  const int region = CpuWeights::region_of(spec);
  if (way == Way::kTable) return home.reserve_table(part);
  if (way == Way::kConvert)
    return home.reserve_converted(part, *experts.format(spec.layer), region);
  return home.reserve(part, region);
}

// Calls visit(spec, slot, whole) for the routed experts of `weights`, a model of its slices, that
// is_wanted(spec, slot) chooses; `whole`: the stored matrix.
template <class IsWanted, class Visit>
void for_each_expert_matrix(ModelWeights& stored, ModelWeights& weights, const ModelConfig& config,
                            IsWanted is_wanted, Visit visit) {
  std::unordered_map<std::string, QuantView*> wanted;
  std::vector<std::pair<WeightSpec, QuantView*>> slots;
  for_each_weight(weights, config, [&](const WeightSpec& spec, QuantView& slot) {
    if (spec.use != WeightUse::kExpert || !is_wanted(spec, slot)) return;
    slots.emplace_back(spec, &slot);
    wanted[spec.name] = nullptr;
  });
  for_each_weight(stored, config, [&](const WeightSpec& spec, QuantView& whole) {
    if (spec.use != WeightUse::kExpert) return;
    if (const auto found = wanted.find(spec.name); found != wanted.end()) found->second = &whole;
  });
  for (auto& [spec, slot] : slots) visit(spec, *slot, *wanted.at(spec.name));
}

// The rows that the parts of a matrix have.
Slice rows_kept(const PackedMatrix& m) {
  int64_t first = m.stored.q.rows, end = 0;
  for (const PackedMatrix::Part& part : m.parts) {
    first = std::min(first, part.first_row);
    end = std::max(end, part.first_row + part.stored.q.rows);
  }
  return {first, end - first};
}

}  // namespace

int64_t packed_bytes(ModelWeights& stored, const ModelConfig& config, const CpuWeights& home,
                     const ExpertsLayout& experts) {
  const Sources sources(stored, config, experts);
  ModelWeights kept;
  kept.share = experts.elsewhere().share;
  int64_t bytes = 0;
  for_each_packed(kept, config, experts, [&](const WeightSpec& spec, QuantView&) {
    bytes += bytes_of(spec, sources.part(spec), home, experts);
  });
  return bytes;
}

std::vector<Slice> expert_slices(const ModelWeights& stored, const ModelConfig& config,
                                 const CpuWeights& home, const ExpertsLayout& experts) {
  if (!experts.node_columns().empty()) {
    std::vector<Slice> slices;
    for (const int n : experts.node_columns())
      slices.push_back({slices.empty() ? 0 : slices.back().first + slices.back().n, n});
    return slices;
  }
  // All layers are sliced alike, at the largest multiple that any layer's format requires.
  DType dtype = DType::kBF16;
  for (int l = 0; l < config.n_all_layers(); ++l) {
    const LayerWeights& layer = stored.layers[l];
    if (layer.experts.empty()) continue;
    const std::optional<WeightFormat>& format = experts.format(l);
    const DType kept = format ? format->dtype : layer.experts[0].gate.q.dtype;
    if (CpuWeights::slice_multiple(kept) >= CpuWeights::slice_multiple(dtype)) dtype = kept;
  }
  return home.expert_slices(config.expert_dim, dtype);
}

PackJobs load_jobs(const PackedModel& model, const CpuWeights& home) {
  PackJobs jobs;
  for (const PackedMatrix& m : model.matrices) {
    const TensorView &q = m.stored.q, &scale = m.stored.scale;
    const Slice rows = rows_kept(m);
    for (int64_t first = rows.first; first < rows.first + rows.n; first += rows_of_job(m))
      jobs.rest.push_back(
          {q.row_data(first), std::min(rows_of_job(m), rows.first + rows.n - first) * q.row_bytes(),
           [&home, &m, first](const std::byte* data) { pack_rows(home, m, first, data); }});
    if (scale.empty()) continue;
    std::vector<LoadJob>& when = m.way == Way::kPackWords ? jobs.first : jobs.rest;
    when.push_back({scale.row_data(0), scale.rows * scale.row_bytes(),
                    [&home, &m](const std::byte* data) { pack_scales(home, m, data); }});
  }
  return jobs;
}

PackedModel reserve_packed(ModelWeights& stored, const ModelConfig& config, CpuWeights& home,
                           const ExpertsLayout& experts) {
  const Sources sources(stored, config, experts);
  PackedModel model;
  model.weights.slices = expert_slices(stored, config, home, experts);
  model.weights.share = experts.elsewhere().share;
  std::vector<int64_t> bytes(home.n_regions());
  for_each_packed(model.weights, config, experts, [&](const WeightSpec& spec, QuantView&) {
    bytes[CpuWeights::region_of(spec)] += bytes_of(spec, sources.part(spec), home, experts);
  });
  home.allocate(bytes);

  std::unordered_map<std::string, size_t> matrix_of;
  for_each_packed(model.weights, config, experts, [&](const WeightSpec& spec, QuantView& slot) {
    const QuantView part = sources.part(spec);
    if (is_vector(spec.use)) {
      slot = home.keep_vector(part);
      return;
    }
    const Way way = way_of(spec, part, experts);
    slot = reserve_matrix(spec, part, way, experts, home);
    const auto [at, is_new] = matrix_of.try_emplace(spec.name, model.matrices.size());
    if (is_new) model.matrices.push_back({way, spec.name, sources.whole(spec), {}});
    model.matrices[at->second].parts.push_back({spec.first_row, part, slot});
  });
  return model;
}

std::vector<ExpertShape> expert_shapes(ModelWeights& stored, const ModelConfig& config,
                                       const CpuWeights& home, const ExpertsLayout& experts,
                                       const std::vector<Slice>& slices) {
  std::vector<ExpertShape> shapes(config.n_all_layers());
  ModelWeights model;
  model.slices = slices;
  for_each_expert_matrix(
      stored, model, config,
      [](const WeightSpec& spec, const QuantView&) { return spec.expert == 0; },
      [&](const WeightSpec& spec, const QuantView&, const QuantView& whole) {
        const QuantView part = part_of(spec, whole);
        ExpertShape& shape = shapes[spec.layer];
        shape.region_bytes.resize(home.n_regions());
        shape.region_bytes[CpuWeights::region_of(spec)] += bytes_of(spec, part, home, experts);
        const std::optional<WeightFormat> format = way_of(spec, part, experts) == Way::kConvert
                                                       ? experts.format(spec.layer)
                                                       : std::nullopt;
        shape.matrices.push_back(
            {spec.rows, spec.cols, static_cast<int64_t>(part.q.dtype), part.scale.rows,
             part.scale.cols, static_cast<int64_t>(part.scale.dtype), part.block_rows,
             part.block_cols, part.row0, part.col0,
             format ? static_cast<int64_t>(format->dtype) : -1, format ? format->group : 0});
      });
  return shapes;
}

std::vector<std::vector<FfnWeights>> reserve_experts(ModelWeights& stored,
                                                     const ModelConfig& config, CpuWeights& home,
                                                     const PackedExpert& of, int n) {
  struct Matrix {
    WeightSpec spec;
    QuantView* slot;
    QuantView part;
  };
  std::vector<Matrix> matrices;
  ModelWeights model;
  model.slices = of.slices;
  for_each_expert_matrix(
      stored, model, config,
      [&](const WeightSpec& spec, const QuantView&) {
        return spec.layer == of.layer && spec.expert == 0;
      },
      [&](const WeightSpec& spec, QuantView& slot, const QuantView& whole) {
        matrices.push_back({spec, &slot, part_of(spec, whole)});
      });
  std::vector<std::vector<FfnWeights>> places(n);
  for (std::vector<FfnWeights>& place : places) {
    for (const auto& [spec, slot, part] : matrices)
      *slot = reserve_matrix(spec, part, way_of(spec, part, of.experts), of.experts, home);
    const std::vector<FfnWeights>& of_layer = model.layers[of.layer].experts;
    for (size_t i = 0; i < of_layer.size(); i += config.router.n_experts)
      place.push_back(of_layer[i]);
  }
  return places;
}

PackedModel packed_experts(ModelWeights& stored, const ModelConfig& config,
                           const ExpertsLayout& experts, ModelWeights places) {
  PackedModel model{.weights = std::move(places), .matrices = {}};
  std::unordered_map<std::string, size_t> matrix_of;
  for_each_expert_matrix(
      stored, model.weights, config,
      [](const WeightSpec&, const QuantView& slot) { return !slot.empty(); },
      [&](const WeightSpec& spec, const QuantView& slot, const QuantView& whole) {
        const QuantView part = part_of(spec, whole);
        const auto [at, is_new] = matrix_of.try_emplace(spec.name, model.matrices.size());
        if (is_new) model.matrices.push_back({way_of(spec, part, experts), spec.name, whole, {}});
        model.matrices[at->second].parts.push_back({spec.first_row, part, slot});
      });
  return model;
}

std::string manifest_of(const ModelWeights& packed, const ModelConfig& config,
                        const CpuWeights& home, const ExpertsLayout& experts) {
  std::string manifest;
  const auto append = [&](const auto& record) {
    manifest.append(reinterpret_cast<const char*>(&record), sizeof record);
  };
  for (int i = 0; i < home.n_regions(); ++i) append(int64_t{std::ssize(home.region(i))});
  ModelWeights weights = packed;
  for_each_packed(weights, config, experts, [&](const WeightSpec& spec, const QuantView& w) {
    const std::span<std::byte> region = home.region(CpuWeights::region_of(spec));
    append(StoredWeight{stored_view(w.q, region), stored_view(w.scale, region), w.block_rows,
                        w.block_cols, w.row0, w.col0});
  });
  return manifest;
}

void allocate_for(std::string_view manifest, int64_t data_bytes, CpuWeights& home) {
  std::vector<int64_t> bytes(home.n_regions());
  require_sound(std::ssize(manifest) >= region_table_bytes(home), "its manifest is too short");
  std::memcpy(bytes.data(), manifest.data(), region_table_bytes(home));
  int64_t begin = 0, end = 0;
  for (const int64_t n : bytes) {
    require_sound(n >= 0 && n <= data_bytes, "its manifest has regions of other sizes");
    end = begin + n;
    begin = CpuWeights::next_region(begin, n);
  }
  require_sound(end == data_bytes, "its manifest has regions of other sizes");
  home.allocate(bytes);
}

ModelWeights weights_of(std::string_view manifest, const ModelConfig& config,
                        std::vector<Slice> slices, const CpuWeights& home, cpu::Layout layout,
                        const ExpertsLayout& experts) {
  ModelWeights weights;
  weights.slices = std::move(slices);
  weights.share = experts.elsewhere().share;
  require_sound(std::ssize(manifest) >= region_table_bytes(home), "its manifest is too short");
  manifest.remove_prefix(region_table_bytes(home));
  for_each_packed(weights, config, experts, [&](const WeightSpec& spec, QuantView& w) {
    StoredWeight stored;
    require_sound(manifest.size() >= sizeof stored, "its manifest ends before {}", spec.name);
    std::memcpy(&stored, manifest.data(), sizeof stored);
    manifest.remove_prefix(sizeof stored);
    require_sound(stored.q.at >= 0 && stored.q.rows == spec.rows && stored.q.cols == spec.cols,
                  "its manifest has another shape of {}", spec.name);
    const bool in_panels =
        layout == cpu::Layout::kPanels && !is_vector(spec.use) && spec.use != WeightUse::kEmbedding;
    const std::span<std::byte> region = home.region(CpuWeights::region_of(spec));
    w = {.q = view_of(stored.q, region, in_panels ? kPackRows : 1),
         .scale = view_of(stored.scale, region, 1),
         .block_rows = static_cast<int>(stored.block_rows),
         .block_cols = static_cast<int>(stored.block_cols),
         .row0 = static_cast<int>(stored.row0),
         .col0 = static_cast<int>(stored.col0)};
  });
  require_sound(manifest.empty(), "its manifest has more than the model");
  return weights;
}

}  // namespace tandem
