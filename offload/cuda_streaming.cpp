#include "offload/cuda_streaming.h"

#include <algorithm>
#include <cstring>

#include "gpu_kernels/hand_off.h"
#include "gpu_kernels/unpack.h"
#include "ops/cuda_weights.h"

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
                             int max_tokens, gpu::Stream& stream)
    : c_(config),
      cpu_(experts),
      w_(experts.weights()),
      team_(experts.team()),
      rows_(rows),
      stream_(stream),
      layers_(w_.layers.size()),
      experts_(kAtOnce * most_bytes(config), gpu::Site::kDevice),
      rows_asked_(config.router.n_experts),
      places_(config.router.n_experts * int64_t{sizeof(int32_t)}, gpu::Site::kMapped),
      ids_(int64_t{max_tokens} * config.router.n_active * int64_t{sizeof(int32_t)},
           gpu::Site::kDevice) {
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
    if (panel_bytes_ > 0 || layers_[l].experts.empty()) continue;
    for_each_part(
        static_cast<int>(l), layers_[l].experts[0],
        [&](const Part& part, int64_t offset) { panel_bytes_ = offset + padded(part.bytes); });
  }
  for (Stage& stage : stages_) {
    stage.pinned = gpu::Buffer(kAtOnce * most_bytes(config), gpu::Site::kMapped);
    stage.panels = gpu::Buffer(kAtOnce * most_bytes(config), gpu::Site::kDevice);
  }
  division_.order.reserve(config.router.n_experts);
}

int64_t CudaStreaming::bytes_for(const ModelConfig& c, int max_tokens) {
  constexpr int64_t kScaleBlock = 64 * 64;  // the smallest that is taken
  const int64_t scales = int64_t{c.n_layers} * c.router.n_experts * 3 *
                         (int64_t{c.dim} * c.expert_dim / kScaleBlock + c.dim) * 4;
  return (kStages + 1) * kAtOnce * most_bytes(c) + (c.scale_block > 0 ? scales : 0) +
         int64_t{max_tokens} * c.router.n_active * int64_t{sizeof(int32_t)};
}

void CudaStreaming::prefetch(int layer) {
  const Layer& l = layers_[layer];
  for (int first = 0; first < l.n_likely; first += kAtOnce)
    bring(layer, Experts(l.likely).subspan(first, kAtOnce), stage(first / kAtOnce));
}

// The thread alternates: while the link brings what the team has copied, the team computes.
void CudaStreaming::add_to(const Shared& step, TensorView y) {
  const int layer = step.on_gpu.layer;
  divide(step.on_cpu);
  const std::span<const int> brought(division_.order.data(), division_.n_on_gpu);
  const int64_t n_stages = (std::ssize(brought) + kAtOnce - 1) / kAtOnce;
  if (n_stages > 0) sort_on_gpu(step.on_gpu);
  if (any_on_cpu_) cpu_.begin(step.on_cpu);
  for (int64_t i = 0; i < n_stages; ++i) {
    const int64_t first = i * kAtOnce;
    const Experts experts =
        brought.subspan(first, std::min<int64_t>(kAtOnce, std::ssize(brought) - first));
    if (first >= layers_[layer].n_likely) {
      if (i >= kStages)
        compute_on_cpu(static_cast<double>(i - kStages + 1) / (n_stages - kStages + 1));
      bring(layer, experts, stage(i));
    }
    compute(layer, experts, stage(i), static_cast<int>(first));
  }
  first_stage_ += n_stages;
  keep_likely(layer);
  if (n_stages > 0) rows_.add_to(sorted_, y);
  if (any_on_cpu_) hand_up(step.sum, y);
}

// Strikes those out that are brought.
void CudaStreaming::divide(const ExpertBatch& on_cpu) {
  const TensorView& ids = on_cpu.routing.ids;
  const auto for_each_id = [&](auto visit) {
    for (int64_t t = 0; t < ids.rows; ++t)
      for (int64_t k = 0; k < ids.cols; ++k)
        if (ids.row<int32_t>(t)[k] >= 0) visit(ids.row<int32_t>(t)[k]);
  };
  std::fill(rows_asked_.begin(), rows_asked_.end(), 0);
  for_each_id([&](int32_t id) { ++rows_asked_[id]; });
  const Layer& layer = layers_[on_cpu.layer];
  divide_experts(rows_asked_, Experts(layer.likely).first(layer.n_likely), rates_, division_);

  auto* const places = places_.as<int32_t>();
  std::fill_n(places, c_.router.n_experts, -1);
  for (int i = 0; i < division_.n_on_gpu; ++i) places[division_.order[i]] = i;
  for_each_id([&](int32_t& id) {
    if (places[id] >= 0) id = -1;
  });
  any_on_cpu_ = false;
  cpu_seconds_ = cpu_seconds_done_ = 0;
  next_on_cpu_ = 0;
  for (int e = 0; e < c_.router.n_experts; ++e) {
    any_on_cpu_ |= places[e] < 0 && rows_asked_[e] > 0;
    cpu_seconds_ += cpu_seconds_of(e);
  }
}

double CudaStreaming::cpu_seconds_of(int expert) const {
  return places_.as<int32_t>()[expert] < 0 ? rates_.cpu.at(rows_asked_[expert]) : 0;
}

void CudaStreaming::sort_on_gpu(const ExpertBatch& batch) {
  const TensorView& ids = batch.routing.ids;
  gpu::place_experts(stream_, {.ids = static_cast<const int32_t*>(ids.data),
                               .ids_stride = ids.stride,
                               .place = places_.as<int32_t>(),
                               .out = ids_.as<int32_t>(),
                               .tokens = static_cast<int>(ids.rows),
                               .n_active = static_cast<int>(ids.cols)});
  const TensorView placed = {ids_.as<void>(), ids.rows, ids.cols, ids.cols, DType::kI32};
  sorted_ = rows_.sort({batch.layer, batch.x, {placed, batch.routing.weights}}, division_.n_on_gpu,
                       weights(batch.layer, kGate, Experts(division_.order).first(1)).first);
}

void CudaStreaming::compute(int layer, Experts experts, Stage& stage, int first) {
  const CudaExpertRows::Range range = {first, static_cast<int>(experts.size())};
  stream_.wait_for(stage.copied);
  unpack(layer, experts, stage);
  stream_.record(stage.unpacked);
  rows_.gate_up(sorted_, weights(layer, kGate, experts), weights(layer, kUp, experts), range);
  rows_.down(sorted_, weights(layer, kDown, experts), range);
}

// Until so much of the CPU's part is done, by what it is expected to take.
void CudaStreaming::compute_on_cpu(double share) {
  if (!any_on_cpu_) return;
  while (next_on_cpu_ < c_.router.n_experts && cpu_seconds_done_ < share * cpu_seconds_)
    cpu_seconds_done_ += cpu_seconds_of(next_on_cpu_++);
  cpu_.compute_below(next_on_cpu_);
}

void CudaStreaming::hand_up(const TensorView& sum, TensorView y) {
  cpu_.compute_below(c_.router.n_experts);
  team_.run(sum.rows, [&](int64_t t, int) { std::fill_n(sum.row<float>(t), c_.dim, 0.f); });
  cpu_.add_to(0, sum);
  gpu::add(stream_,
           {gpu_matrix(y), {sum.row<float>(0), sum.stride}, static_cast<int>(y.rows), c_.dim});
}

// Those with the most rows will probably be brought in the next step too. Where no others were
// worth it some of these may not have been either: then a stage less.
void CudaStreaming::keep_likely(int layer) {
  Layer& l = layers_[layer];
  const auto brought = division_.order.begin();
  const int n = division_.n_on_gpu, n_stages = n / kAtOnce - (n == l.n_likely);
  l.n_likely = std::clamp(n_stages, 0, kStages) * kAtOnce;
  std::partial_sort_copy(brought, brought + n, l.likely.begin(), l.likely.begin() + l.n_likely,
                         [&](int a, int b) { return rows_asked_[a] > rows_asked_[b]; });
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
void CudaStreaming::bring(int layer, Experts experts, Stage& stage) {
  stage.copied.wait();
  send(copy_panels(layer, experts, stage), stage);
}

// How many bytes of the stage are used.
int64_t CudaStreaming::copy_panels(int layer, Experts experts, Stage& stage) {
  struct Piece {
    const std::byte* from;
    std::byte* to;
    int64_t bytes;
  };
  constexpr int kMaxPieces = 256;
  std::array<Piece, kMaxPieces> pieces;
  int n_pieces = 0;
  int64_t used = 0;
  for (size_t i = 0; i < experts.size(); ++i)
    for_each_part(layer, experts[i], [&](const Part& part, int64_t offset) {
      const int64_t at = static_cast<int64_t>(i) * panel_bytes_ + offset;
      check(n_pieces < kMaxPieces, "parts of some experts");
      pieces[n_pieces++] = {part.packed.q.row_data(0), stage.pinned.as<std::byte>() + at,
                            part.bytes};
      used = at + part.bytes;
    });
  for (int p = 0; p < n_pieces; ++p)
    team_.run((pieces[p].bytes + kCopied - 1) / kCopied, [&](int64_t item, int) {
      const int64_t at = item * kCopied;
      std::memcpy(pieces[p].to + at, pieces[p].from + at,
                  static_cast<size_t>(std::min(kCopied, pieces[p].bytes - at)));
    });
  return used;
}

void CudaStreaming::send(int64_t bytes, Stage& stage) {
  copies_.wait_for(stage.unpacked);
  copies_.copy(stage.pinned.as<std::byte>(), bytes, stage.panels.as<std::byte>());
  copies_.record(stage.copied);
  bytes_streamed_ += bytes;
}

void CudaStreaming::unpack(int layer, Experts experts, const Stage& stage) {
  const int64_t size = number_bytes();
  for (size_t i = 0; i < experts.size(); ++i)
    for_each_part(layer, experts[i], [&](const Part& part, int64_t offset) {
      const TensorView& q = part.packed.q;
      const int64_t stride = row_bytes(part.matrix), at = static_cast<int64_t>(i);
      // Behind the last column zeros fill the row up.
      const bool last = part.first_col + q.cols == cols_of(part.matrix);
      const int64_t bytes = last ? stride - part.first_col * size : q.cols * size;
      gpu::unpack_panels(
          stream_, {.panels = stage.panels.as<uint8_t>() + at * panel_bytes_ + offset,
                    .panel_bytes = q.row_bytes(),
                    .type = type_,
                    .out = experts_.as<uint8_t>() + at * most_bytes(c_) + offset_of(part.matrix) +
                           part.first_row * stride + part.first_col * size,
                    .row_bytes = stride,
                    .rows = static_cast<int>(q.rows),
                    .bytes = static_cast<int>(bytes)});
    });
}

gpu::ExpertWeights CudaStreaming::weights(int layer, Matrix m, Experts experts) const {
  gpu::ExpertWeights w = {.first = {.data = experts_.as<uint8_t>() + offset_of(m),
                                    .stride = row_bytes(m) / number_bytes(),
                                    .type = type_,
                                    .rows = static_cast<int>(rows_of(m)),
                                    .cols = static_cast<int>(cols_of(m))},
                          .weight_stride = most_bytes(c_),
                          .scale_stride = 0};
  if (block_ == 0) return w;
  const int64_t each = scales_before(kMatrices), first = place_of(layer, experts.front());
  w.scale_stride = (place_of(layer, experts.back()) - first) * each;
  w.first.scale = layers_[layer].scales.as<float>() + first * each + scales_before(m);
  w.first.scale_stride = n_blocks(cols_of(m), block_);
  w.first.block_rows = w.first.block_cols = block_;
  return w;
}

int64_t CudaStreaming::place_of(int layer, int expert) const {
  const std::vector<int>& all = layers_[layer].experts;
  return std::lower_bound(all.begin(), all.end(), expert) - all.begin();
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
