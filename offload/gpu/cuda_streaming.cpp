#include "offload/gpu/cuda_streaming.h"

#include <algorithm>

#include "core/rounding.h"
#include "gpu_kernels/exchange/hand_off.h"
#include "ops/cuda_weights.h"

namespace tandem {

CudaStreaming::CudaStreaming(const ModelConfig& config, CpuExperts& experts, CudaExpertRows& rows,
                             int max_tokens, gpu::Stream& stream)
    : c_(config),
      cpu_(experts),
      rows_(rows),
      stream_(stream),
      upload_(config, experts, stream),
      likely_(config.n_all_layers()),
      rows_asked_(config.router.n_experts),
      places_(config.router.n_experts * int64_t{sizeof(int32_t)}, gpu::Site::kMapped),
      ids_(int64_t{max_tokens} * config.router.n_active * int64_t{sizeof(int32_t)},
           gpu::Site::kDevice) {
  division_.order.reserve(config.router.n_experts);
}

int64_t CudaStreaming::bytes_for(const ModelConfig& c, int max_tokens) {
  return ExpertUpload::bytes_for(c) +
         int64_t{max_tokens} * c.router.n_active * int64_t{sizeof(int32_t)};
}

void CudaStreaming::prefetch(int layer) {
  const Likely& likely = likely_[layer];
  for (int first = 0; first < likely.n; first += kAtOnce)
    upload_.start(layer, Experts(likely.experts).subspan(first, kAtOnce), stage(first / kAtOnce));
}

// The thread alternates: while the link sends what the team has copied, the team computes.
void CudaStreaming::add_to(const Shared& step, TensorView y) {
  const int layer = step.on_gpu.layer;
  divide(step.on_cpu);
  const std::span<const int> streamed(division_.order.data(), division_.n_on_gpu);
  const int64_t n_stages = ceil_div(std::ssize(streamed), kAtOnce);
  if (n_stages > 0) sort_on_gpu(step.on_gpu);
  if (any_on_cpu_) cpu_.begin(step.on_cpu);
  for (int64_t i = 0; i < n_stages; ++i) {
    const int64_t first = i * kAtOnce;
    const Experts experts =
        streamed.subspan(first, std::min<int64_t>(kAtOnce, std::ssize(streamed) - first));
    if (first >= likely_[layer].n) {
      if (i >= ExpertUpload::kStages)
        compute_on_cpu(static_cast<double>(i - ExpertUpload::kStages + 1) /
                       (n_stages - ExpertUpload::kStages + 1));
      upload_.start(layer, experts, stage(i));
    }
    compute(layer, experts, stage(i), static_cast<int>(first));
  }
  first_stage_ += n_stages;
  keep_likely(layer);
  if (n_stages > 0) rows_.add_to(sorted_, y);
  if (any_on_cpu_) hand_up(step.sum, y);
}

// Decides which experts are streamed, and removes their ids from the CPU's part.
void CudaStreaming::divide(const ExpertBatch& on_cpu) {
  const TensorView& ids = on_cpu.routing.ids;
  const auto for_each_id = [&](auto visit) {
    for (int64_t t = 0; t < ids.rows; ++t)
      for (int64_t k = 0; k < ids.cols; ++k)
        if (ids.row<int32_t>(t)[k] >= 0) visit(ids.row<int32_t>(t)[k]);
  };
  std::fill(rows_asked_.begin(), rows_asked_.end(), 0);
  for_each_id([&](int32_t id) { ++rows_asked_[id]; });
  const Likely& likely = likely_[on_cpu.layer];
  divide_experts(rows_asked_, Experts(likely.experts).first(likely.n), rates_, division_);

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
  sorted_ = rows_.sort(
      {batch.layer, batch.x, {placed, batch.routing.weights}}, division_.n_on_gpu,
      upload_.weights(batch.layer, ExpertUpload::kGate, Experts(division_.order).first(1)).first);
}

void CudaStreaming::compute(int layer, Experts experts, int stage, int first) {
  const CudaExpertRows::Range range = {first, static_cast<int>(experts.size())};
  const auto weights = [&](ExpertUpload::Matrix m) { return upload_.weights(layer, m, experts); };
  upload_.finish(layer, experts, stage);
  rows_.gate_up(sorted_, weights(ExpertUpload::kGate), weights(ExpertUpload::kUp), range);
  rows_.down(sorted_, weights(ExpertUpload::kDown), range);
}

// Computes until this share of the CPU's part is done, by its expected time.
void CudaStreaming::compute_on_cpu(double share) {
  if (!any_on_cpu_) return;
  while (next_on_cpu_ < c_.router.n_experts && cpu_seconds_done_ < share * cpu_seconds_)
    cpu_seconds_done_ += cpu_seconds_of(next_on_cpu_++);
  cpu_.compute_below(next_on_cpu_);
}

void CudaStreaming::hand_up(const TensorView& sum, TensorView y) {
  cpu_.compute_below(c_.router.n_experts);
  cpu_.team().run(sum.rows, [&](int64_t t, int) { std::fill_n(sum.row<float>(t), c_.dim, 0.f); });
  cpu_.add_to(0, sum);
  gpu::add(stream_,
           {gpu_matrix(y), {sum.row<float>(0), sum.stride}, static_cast<int>(y.rows), c_.dim});
}

// The experts with the most rows will probably be streamed in the next step too. Where no others
// were worth it, some of these may not have been either: then a stage less.
void CudaStreaming::keep_likely(int layer) {
  Likely& likely = likely_[layer];
  const auto streamed = division_.order.begin();
  const int n = division_.n_on_gpu, n_stages = n / kAtOnce - (n == likely.n);
  likely.n = std::clamp(n_stages, 0, ExpertUpload::kStages) * kAtOnce;
  std::partial_sort_copy(streamed, streamed + n, likely.experts.begin(),
                         likely.experts.begin() + likely.n,
                         [&](int a, int b) { return rows_asked_[a] > rows_asked_[b]; });
}

}  // namespace tandem
