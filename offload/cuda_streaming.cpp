#include "offload/cuda_streaming.h"

#include <algorithm>
#include <cstring>

#include "gpu_kernels/unpack.h"

namespace tandem {
namespace {

constexpr int64_t kCopied = 256 << 10;  // bytes that a thread copies at a time

int64_t padded(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// Of the first layer that has any.
const FfnWeights* some_expert(const ModelWeights& w) {
  for (const LayerWeights& layer : w.layers)
    for (const FfnWeights& e : layer.experts)
      if (!e.gate.empty()) return &e;
  return nullptr;
}

int64_t n_blocks(int64_t n, int block) { return (n + block - 1) / block; }

// Enough for an expert in panels, whose slices are each filled up, or in rows.
int64_t most_bytes(const ModelConfig& c) {
  const int64_t number = c.scale_block > 0 ? 1 : sizeof(bf16);
  constexpr int64_t kSlices = 8, kPanel = 16, kColumns = 64;
  const int64_t cols = c.dim + kColumns, rows = c.expert_dim + kSlices * (kPanel + kColumns);
  return 3 * (cols + kPanel) * rows * number;
}

}  // namespace

bool CudaStreaming::takes(const CpuExperts& experts) {
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

CudaStreaming::CudaStreaming(const ModelConfig& config, CpuExperts& experts, CudaExpertRows& rows,
                             gpu::Stream& stream)
    : c_(config),
      w_(experts.weights()),
      team_(experts.team()),
      rows_(rows),
      stream_(stream),
      layers_(w_.layers.size()),
      experts_(kAtOnce * most_bytes(config), gpu::Site::kDevice) {
  require(takes(experts),
          "experts in this format are not brought to the GPU: only bf16 and the checkpoint's fp8 "
          "are, with AVX2 or more; make stream_from_tokens 0");
  const QuantView& gate = some_expert(w_)->gate;
  type_ = gate.q.dtype == DType::kBF16 ? Number::kBF16 : Number::kF8E4M3;
  block_ = gate.scale.empty() ? 0 : gate.block_rows;
  for (size_t l = 0; l < layers_.size(); ++l) {
    const std::vector<FfnWeights>& all = w_.layers[l].experts;
    for (int e = 0; e < std::min<int64_t>(std::ssize(all), config.router.n_experts); ++e)
      if (!all[e].gate.empty()) layers_[l].experts.push_back(e);
    if (block_ > 0) keep_scales(static_cast<int>(l));
  }
  for (Stage& stage : stages_) {
    stage.pinned = gpu::Buffer(kAtOnce * most_bytes(config), gpu::Site::kMapped);
    stage.panels = gpu::Buffer(kAtOnce * most_bytes(config), gpu::Site::kDevice);
  }
}

int64_t CudaStreaming::bytes_for(const ModelConfig& c) {
  constexpr int64_t kScaleBlock = 64 * 64;  // the smallest that is taken
  const int64_t scales = int64_t{c.n_layers} * c.router.n_experts * 3 *
                         (int64_t{c.dim} * c.expert_dim / kScaleBlock + c.dim) * 4;
  return (kStages + 1) * kAtOnce * most_bytes(c) + (c.scale_block > 0 ? scales : 0);
}

void CudaStreaming::add_to(const ExpertBatch& batch, TensorView y) {
  const Layer& layer = layers_[batch.layer];
  const auto n_experts = static_cast<int>(layer.experts.size());
  rows_.sort(batch, n_experts);
  for (int first = 0; first < n_experts; first += kAtOnce) {
    const int n = std::min(kAtOnce, n_experts - first);
    Stage& stage = stages_[next_stage_];
    next_stage_ = (next_stage_ + 1) % kStages;
    bring(batch.layer, first, n, stage);
    stream_.wait_for(stage.copied);
    unpack(batch.layer, first, n, stage);
    stream_.record(stage.unpacked);
    rows_.gate_up(weights(batch.layer, kGate, first), weights(batch.layer, kUp, first), {first, n});
    rows_.down(weights(batch.layer, kDown, first), {first, n});
  }
  rows_.add_to(y);
}

// visit(part, offset among the expert's panels)
template <class Visit>
void CudaStreaming::for_each_part(int layer, int expert, Visit visit) const {
  const int n_experts = c_.router.n_experts;
  const int64_t n_slices = std::max<int64_t>(1, std::ssize(w_.slices));
  int64_t offset = 0;
  for (int64_t slice = 0; slice < n_slices; ++slice) {
    const FfnWeights& e = w_.layers[layer].experts[slice * n_experts + expert];
    if (e.gate.empty()) continue;
    const int64_t first = w_.slices.empty() ? 0 : w_.slices[slice].first;
    for (const Matrix m : {kGate, kUp, kDown}) {
      const QuantView& packed = m == kGate ? e.gate : m == kUp ? e.up : e.down;
      const int64_t panels = (packed.q.rows + cpu::kPanelRows - 1) / cpu::kPanelRows;
      const Part part = {m, packed, panels * packed.q.row_bytes(), m == kDown ? 0 : first,
                         m == kDown ? first : 0};
      visit(part, offset);
      offset += padded(part.bytes);
    }
  }
  check(offset <= most_bytes(c_), "an expert fits its stage");
}

void CudaStreaming::keep_scales(int layer) {
  const std::vector<int>& experts = layers_[layer].experts;
  if (experts.empty()) return;
  const int64_t each = scales_before(kMatrices);
  std::vector<float> all(each * experts.size());
  for (size_t i = 0; i < experts.size(); ++i)
    for_each_part(layer, experts[i], [&](const Part& part, int64_t) {
      const TensorView& from = part.packed.scale;
      float* const to = all.data() + i * each + scales_before(part.matrix) +
                        part.first_row / block_ * n_blocks(cols_of(part.matrix), block_) +
                        part.first_col / block_;
      for (int64_t r = 0; r < from.rows; ++r)
        std::copy_n(from.row<float>(r), from.cols, to + r * n_blocks(cols_of(part.matrix), block_));
    });
  gpu::Buffer& scales = layers_[layer].scales;
  scales = gpu::Buffer(std::ssize(all) * int64_t{sizeof(float)}, gpu::Site::kDevice);
  copies_.copy(all.data(), scales.bytes(), scales.as<float>());
  copies_.wait();
}

// The team copies to pinned memory, which a link reads at its full speed; then the link to the
// card.
void CudaStreaming::bring(int layer, int first, int n, Stage& stage) {
  struct Piece {
    const std::byte* from;
    std::byte* to;
    int64_t bytes;
  };
  constexpr int kMostPieces = 256;
  std::array<Piece, kMostPieces> pieces;
  int n_pieces = 0;
  int64_t used = 0;
  for (int i = 0; i < n; ++i)
    for_each_part(layer, layers_[layer].experts[first + i], [&](const Part& part, int64_t offset) {
      const int64_t at = i * most_bytes(c_) + offset;
      check(n_pieces < kMostPieces, "parts of some experts");
      pieces[n_pieces++] = {part.packed.q.row_data(0), stage.pinned.as<std::byte>() + at,
                            part.bytes};
      used = at + part.bytes;
    });
  stage.copied.wait();
  for (int p = 0; p < n_pieces; ++p)
    team_.run((pieces[p].bytes + kCopied - 1) / kCopied, [&](int64_t item, int) {
      const int64_t at = item * kCopied;
      std::memcpy(pieces[p].to + at, pieces[p].from + at,
                  static_cast<size_t>(std::min(kCopied, pieces[p].bytes - at)));
    });
  copies_.wait_for(stage.unpacked);
  copies_.copy(stage.pinned.as<std::byte>(), used, stage.panels.as<std::byte>());
  copies_.record(stage.copied);
}

void CudaStreaming::unpack(int layer, int first, int n, const Stage& stage) {
  const int64_t size = number_bytes();
  for (int i = 0; i < n; ++i)
    for_each_part(layer, layers_[layer].experts[first + i], [&](const Part& part, int64_t offset) {
      const TensorView& q = part.packed.q;
      const int64_t stride = row_bytes(part.matrix);
      // Behind the last column zeros fill the row up.
      const bool last = part.first_col + q.cols == cols_of(part.matrix);
      const int64_t bytes = last ? stride - part.first_col * size : q.cols * size;
      gpu::unpack_panels(
          stream_, {.panels = stage.panels.as<uint8_t>() + i * most_bytes(c_) + offset,
                    .panel_bytes = q.row_bytes(),
                    .type = type_,
                    .out = experts_.as<uint8_t>() + i * most_bytes(c_) + offset_of(part.matrix) +
                           part.first_row * stride + part.first_col * size,
                    .row_bytes = stride,
                    .rows = static_cast<int>(q.rows),
                    .bytes = static_cast<int>(bytes)});
    });
}

gpu::ExpertWeights CudaStreaming::weights(int layer, Matrix m, int first) const {
  gpu::ExpertWeights w = {.first = {.data = experts_.as<uint8_t>() + offset_of(m),
                                    .stride = row_bytes(m) / number_bytes(),
                                    .type = type_,
                                    .rows = static_cast<int>(rows_of(m)),
                                    .cols = static_cast<int>(cols_of(m))},
                          .weight_stride = most_bytes(c_),
                          .scale_stride = 0};
  if (block_ == 0) return w;
  w.scale_stride = scales_before(kMatrices);
  w.first.scale = layers_[layer].scales.as<float>() + first * w.scale_stride + scales_before(m);
  w.first.scale_stride = n_blocks(cols_of(m), block_);
  w.first.block_rows = w.first.block_cols = block_;
  return w;
}

int64_t CudaStreaming::row_bytes(Matrix m) const {
  return (cols_of(m) * number_bytes() + 15) / 16 * 16;
}

int64_t CudaStreaming::scales_before(int matrix) const {
  int64_t n = 0;
  for (int m = 0; m < matrix; ++m)
    n += n_blocks(rows_of(Matrix(m)), block_) * n_blocks(cols_of(Matrix(m)), block_);
  return n;
}

int64_t CudaStreaming::offset_of(Matrix m) const {
  if (m == kGate) return 0;
  return (m == kDown ? 2 : 1) * padded(rows_of(kGate) * row_bytes(kGate));
}

}  // namespace tandem
