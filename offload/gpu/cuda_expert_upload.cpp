#include "offload/gpu/cuda_expert_upload.h"

#include <algorithm>
#include <cstring>

#include "core/rounding.h"
#include "gpu_kernels/unpack.h"
#include "ops/cuda_weights.h"

namespace tandem {
namespace {

constexpr int64_t kCopied = 256 << 10;  // bytes that a thread copies at a time

int64_t padded(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// An expert of the first layer that has any; null if none has.
const FfnWeights* some_expert(const ModelWeights& w) {
  for (const LayerWeights& layer : w.layers)
    for (const FfnWeights& e : layer.experts)
      if (!e.gate.empty()) return &e;
  return nullptr;
}

// Bytes that suffice for an expert in panels, each slice of which is padded, or in rows.
int64_t most_bytes(const ModelConfig& c) {
  const int64_t number = c.scale_block > 0 ? 1 : sizeof(bf16);
  constexpr int64_t kSlices = 8, kPanel = 16, kColumns = 64;
  const int64_t cols = c.dim + kColumns, rows = c.expert_dim + kSlices * (kPanel + kColumns);
  return 3 * (cols + kPanel) * rows * number;
}

}  // namespace

bool ExpertUpload::takes(const CpuExperts& experts) {
  const FfnWeights* some = some_expert(experts.weights());
  if (!some || experts.kernels().layout != cpu::Layout::kPanels) return false;
  for (const LayerWeights& layer : experts.weights().layers)
    for (const FfnWeights& e : layer.experts)
      for (const QuantView* m : {&e.gate, &e.up, &e.down}) {
        if (m->empty()) continue;
        if (m->q.dtype != some->gate.q.dtype) return false;
        if (m->q.dtype == DType::kBF16) continue;
        const bool blocks = m->q.dtype == DType::kF8E4M3 && m->block_rows == m->block_cols &&
                            m->block_cols % 64 == 0 && m->row0 == 0 && m->col0 == 0;
        if (!blocks) return false;
      }
  return true;
}

ExpertUpload::ExpertUpload(const ModelConfig& config, CpuExperts& experts, gpu::Stream& stream)
    : c_(config),
      w_(experts.weights()),
      team_(experts.team()),
      stream_(stream),
      layers_(w_.layers.size()),
      rows_(kAtOnce * most_bytes(config), gpu::Site::kDevice) {
  require(
      takes(experts),
      "experts in this format cannot be streamed to the GPU: only bf16 and the checkpoint's fp8 "
      "can, with AVX2 or more; set stream_from_tokens to 0");
  const QuantView& gate = some_expert(w_)->gate;
  type_ = gate.q.dtype == DType::kBF16 ? Number::kBF16 : Number::kF8E4M3;
  block_ = gate.scale.empty() ? 0 : gate.block_rows;
  for (size_t l = 0; l < layers_.size(); ++l) {
    read_experts(static_cast<int>(l));
    if (panel_bytes_ > 0 || layers_[l].experts.empty()) continue;
    for_each_piece(
        static_cast<int>(l), layers_[l].experts[0],
        [&](const Piece& piece, int64_t offset) { panel_bytes_ = offset + padded(piece.bytes); });
  }
  for (Stage& stage : stages_) {
    stage.pinned = gpu::Buffer(kAtOnce * most_bytes(config), gpu::Site::kMapped);
    stage.panels = gpu::Buffer(kAtOnce * most_bytes(config), gpu::Site::kDevice);
  }
}

void ExpertUpload::read_experts(int layer) {
  const std::vector<FfnWeights>& all = w_.layers[layer].experts;
  layers_[layer].experts.clear();
  for (int e = 0; e < std::min<int64_t>(std::ssize(all), c_.router.n_experts); ++e)
    if (!all[e].gate.empty()) layers_[layer].experts.push_back(e);
  if (block_ > 0) keep_scales(layer);
}

int64_t ExpertUpload::bytes_for(const ModelConfig& c) {
  constexpr int64_t kScaleBlock = 64 * 64;  // the smallest that is taken
  const int64_t scales = int64_t{c.n_all_layers()} * c.router.n_experts * 3 *
                         (int64_t{c.dim} * c.expert_dim / kScaleBlock + c.dim) * 4;
  return (kStages + 1) * kAtOnce * most_bytes(c) + (c.scale_block > 0 ? scales : 0);
}

void ExpertUpload::start(int layer, Experts experts, int stage) {
  stages_[stage].copied.wait();
  send(copy(layer, experts, stage), stage);
}

int64_t ExpertUpload::copy(int layer, Experts experts, int stage) {
  struct Copy {
    const std::byte* from;
    std::byte* to;
    int64_t bytes;
  };
  constexpr int kMaxCopies = 256;
  std::array<Copy, kMaxCopies> copies;
  int n_copies = 0;
  int64_t used = 0;
  for (size_t i = 0; i < experts.size(); ++i)
    for_each_piece(layer, experts[i], [&](const Piece& piece, int64_t offset) {
      const int64_t at = static_cast<int64_t>(i) * panel_bytes_ + offset;
      check(n_copies < kMaxCopies, "the copies of a stage fit the list");
      copies[n_copies++] = {piece.packed.q.row_data(0), stages_[stage].pinned.as<std::byte>() + at,
                            piece.bytes};
      used = at + piece.bytes;
    });
  for (int p = 0; p < n_copies; ++p)
    team_.run(ceil_div(copies[p].bytes, kCopied), [&](int64_t item, int) {
      const int64_t at = item * kCopied;
      std::memcpy(copies[p].to + at, copies[p].from + at,
                  static_cast<size_t>(std::min(kCopied, copies[p].bytes - at)));
    });
  return used;
}

void ExpertUpload::send(int64_t bytes, int stage) {
  Stage& s = stages_[stage];
  copies_.wait_for(s.unpacked);
  copies_.copy(s.pinned.as<std::byte>(), bytes, s.panels.as<std::byte>());
  copies_.record(s.copied);
  bytes_sent_ += bytes;
}

void ExpertUpload::finish(int layer, Experts experts, int stage) {
  Stage& s = stages_[stage];
  stream_.wait_for(s.copied);
  const int64_t size = number_bytes();
  for (size_t i = 0; i < experts.size(); ++i)
    for_each_piece(layer, experts[i], [&](const Piece& piece, int64_t offset) {
      const TensorView& q = piece.packed.q;
      const int64_t stride = row_bytes(piece.matrix), at = static_cast<int64_t>(i);
      // Zeros pad the row behind its last column.
      const bool last = piece.first_col + q.cols == cols_of(piece.matrix);
      const int64_t bytes = last ? stride - piece.first_col * size : q.cols * size;
      gpu::unpack_panels(
          stream_, {.panels = s.panels.as<uint8_t>() + at * panel_bytes_ + offset,
                    .panel_bytes = q.row_bytes(),
                    .type = type_,
                    .out = rows_.as<uint8_t>() + at * most_bytes(c_) + offset_of(piece.matrix) +
                           piece.first_row * stride + piece.first_col * size,
                    .row_bytes = stride,
                    .rows = static_cast<int>(q.rows),
                    .bytes = static_cast<int>(bytes)});
    });
  stream_.record(s.unpacked);
}

// Calls visit(piece, offset among the expert's panels).
template <class Visit>
void ExpertUpload::for_each_piece(int layer, int expert, Visit visit) const {
  const int n_experts = c_.router.n_experts;
  const int64_t n_slices = std::max<int64_t>(1, std::ssize(w_.slices));
  int64_t offset = 0;
  for (int64_t slice = 0; slice < n_slices; ++slice) {
    const FfnWeights& e = w_.layers[layer].experts[slice * n_experts + expert];
    if (e.gate.empty()) continue;
    const int64_t first = w_.slices.empty() ? 0 : w_.slices[slice].first;
    for (const Matrix m : {kGate, kUp, kDown}) {
      const QuantView& packed = m == kGate ? e.gate : m == kUp ? e.up : e.down;
      const int64_t panels = ceil_div(packed.q.rows, cpu::kPanelRows);
      const Piece piece = {m, packed, panels * packed.q.row_bytes(), m == kDown ? 0 : first,
                           m == kDown ? first : 0};
      visit(piece, offset);
      offset += padded(piece.bytes);
    }
  }
  check(offset <= most_bytes(c_), "an expert fits its stage");
}

void ExpertUpload::keep_scales(int layer) {
  const std::vector<int>& experts = layers_[layer].experts;
  if (experts.empty()) return;
  const int64_t each = scales_before(kMatrices);
  std::vector<float> all(each * experts.size());
  for (size_t i = 0; i < experts.size(); ++i)
    for_each_piece(layer, experts[i], [&](const Piece& piece, int64_t) {
      const TensorView& from = piece.packed.scale;
      float* const to = all.data() + i * each + scales_before(piece.matrix) +
                        piece.first_row / block_ * ceil_div(cols_of(piece.matrix), block_) +
                        piece.first_col / block_;
      for (int64_t r = 0; r < from.rows; ++r)
        std::copy_n(from.row<float>(r), from.cols,
                    to + r * ceil_div(cols_of(piece.matrix), block_));
    });
  gpu::Buffer& scales = layers_[layer].scales;
  const int64_t bytes = std::ssize(all) * int64_t{sizeof(float)};
  if (scales.bytes() != bytes) scales = gpu::Buffer(bytes, gpu::Site::kDevice);
  copies_.copy(all.data(), scales.bytes(), scales.as<float>());
  copies_.wait();
}

gpu::ExpertWeights ExpertUpload::weights(int layer, Matrix m, Experts experts) const {
  gpu::ExpertWeights w = {.first = {.data = rows_.as<uint8_t>() + offset_of(m),
                                    .stride = row_bytes(m) / number_bytes(),
                                    .type = type_,
                                    .rows = static_cast<int>(rows_of(m)),
                                    .cols = static_cast<int>(cols_of(m))},
                          .weight_stride = most_bytes(c_),
                          .scale_stride = 0};
  if (block_ == 0) return w;
  const int64_t each = scales_before(kMatrices), first = index_of(layer, experts.front());
  w.scale_stride = (index_of(layer, experts.back()) - first) * each;
  w.first.scale = layers_[layer].scales.as<float>() + first * each + scales_before(m);
  w.first.scale_stride = ceil_div(cols_of(m), block_);
  w.first.block_rows = w.first.block_cols = block_;
  return w;
}

int64_t ExpertUpload::index_of(int layer, int expert) const {
  const std::vector<int>& all = layers_[layer].experts;
  return std::lower_bound(all.begin(), all.end(), expert) - all.begin();
}

int64_t ExpertUpload::row_bytes(Matrix m) const {
  return (cols_of(m) * number_bytes() + 15) / 16 * 16;
}

int64_t ExpertUpload::scales_before(int matrix) const {
  int64_t n = 0;
  for (int m = 0; m < matrix; ++m)
    n += ceil_div(rows_of(Matrix(m)), block_) * ceil_div(cols_of(Matrix(m)), block_);
  return n;
}

int64_t ExpertUpload::offset_of(Matrix m) const {
  if (m == kGate) return 0;
  return (m == kDown ? 2 : 1) * padded(rows_of(kGate) * row_bytes(kGate));
}

}  // namespace tandem
