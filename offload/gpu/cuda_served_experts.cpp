#include "offload/gpu/cuda_served_experts.h"

#include <algorithm>
#include <utility>

#include "ops/cuda_weights.h"

namespace tandem {
namespace {

constexpr int64_t kNumberBytes = 4;  // of a float, and of an expert's number

int64_t row_bytes(const ModelConfig& c) { return c.dim * kNumberBytes; }
int64_t pair_bytes(const ModelConfig& c) { return 2 * c.router.n_active * kNumberBytes; }

}  // namespace

CudaServedExperts::CudaServedExperts(const ModelConfig& config, const Parts& parts, int max_rows)
    : c_(config),
      p_(parts),
      places_(CudaExperts::places(config, parts.on_gpu, {})),
      x_(max_rows * row_bytes(config), gpu::Site::kDevice),
      sums_(max_rows * row_bytes(config), gpu::Site::kDevice),
      pairs_(max_rows * pair_bytes(config), gpu::Site::kDevice),
      x_of_host_(x_.bytes(), gpu::Site::kMapped),
      sums_of_host_(sums_.bytes(), gpu::Site::kMapped),
      pairs_of_host_(pairs_.bytes(), gpu::Site::kMapped),
      cpu_ids_(int64_t{max_rows} * config.router.n_active) {}

int64_t CudaServedExperts::bytes_for(const ModelConfig& c, int max_rows) {
  return max_rows * (2 * row_bytes(c) + pair_bytes(c));
}

Ticket CudaServedExperts::start(const ExpertBatch& batch) {
  divide(batch);
  if (uses_gpu_) enqueue(batch);
  if (uses_cpu_) {
    ExpertBatch others = batch;
    others.routing.ids.data = cpu_ids_.data();
    others.routing.ids.stride = c_.router.n_active;
    p_.cpu.submit(others);
  }
  return 0;
}

void CudaServedExperts::add_to(Ticket, TensorView y) {
  if (uses_gpu_) {
    waits_ = true;
    p_.stream.wait();
    waits_ = false;
    ++n_waits_;
    const TensorView from = rows_in(sums_of_host_, y.rows);
    p_.cpu.team().run(y.rows, [&](int64_t row, int) {
      const float* const sum = from.row<float>(row);
      float* const to = y.row<float>(row);
      for (int64_t i = 0; i < y.cols; ++i) to[i] += sum[i];
    });
  }
  if (uses_cpu_) p_.cpu.add_to(0, y);
}

// Writes who computes which experts of each row.
void CudaServedExperts::divide(const ExpertBatch& batch) {
  const std::vector<int32_t>& places = places_[batch.layer];
  const int n_active = c_.router.n_active;
  const int64_t n_pairs = batch.x.rows * n_active;
  auto* ids = pairs_of_host_.as<int32_t>();
  auto* weights = pairs_of_host_.as<float>() + n_pairs;
  int32_t* others = cpu_ids_.data();
  uses_gpu_ = uses_cpu_ = false;
  for (int64_t row = 0; row < batch.x.rows; ++row) {
    const auto* const chosen = batch.routing.ids.row<int32_t>(row);
    const auto* const of_chosen = batch.routing.weights.row<float>(row);
    int n = 0;  // of those on the GPU, in ascending order
    for (int k = 0; k < n_active; ++k) {
      const int32_t place = chosen[k] < 0 ? ExpertPlaces::kOnCpu : places[chosen[k]];
      others[k] = place < 0 ? chosen[k] : -1;
      uses_cpu_ = uses_cpu_ || others[k] >= 0;
      if (place < 0) continue;
      int at = n++;
      for (; at > 0 && ids[at - 1] > place; --at) {
        ids[at] = ids[at - 1];
        weights[at] = weights[at - 1];
      }
      ids[at] = place;
      weights[at] = of_chosen[k];
    }
    uses_gpu_ = uses_gpu_ || n > 0;
    std::fill(ids + n, ids + n_active, -1);
    std::fill(weights + n, weights + n_active, 0.0f);
    ids += n_active;
    weights += n_active;
    others += n_active;
  }
}

// Enqueues the GPU's share, from the copy of the rows to that of their sums.
void CudaServedExperts::enqueue(const ExpertBatch& batch) {
  const int64_t n = batch.x.rows, n_pairs = n * c_.router.n_active;
  check(batch.x.dtype == DType::kF32, "rows of a worker with a GPU are float");
  const TensorView rows = rows_in(x_of_host_, n);
  p_.cpu.team().run(n, [&](int64_t row, int) {
    std::copy_n(batch.x.row<float>(row), c_.dim, rows.row<float>(row));
  });
  p_.stream.copy(rows.data, n * row_bytes(c_), x_.as<void>());
  p_.stream.copy(pairs_of_host_.as<void>(), n * pair_bytes(c_), pairs_.as<void>());
  const TensorView y = rows_in(sums_, n);
  const auto pairs = [&](void* data, DType dtype) {
    return TensorView{data, n, c_.router.n_active, c_.router.n_active, dtype};
  };
  gpu::clear(p_.stream, {gpu_matrix(y), {}, static_cast<int>(n), static_cast<int>(y.cols)});
  const Ticket ticket =
      p_.gpu.submit({.layer = batch.layer,
                     .x = rows_in(x_, n),
                     .routing = {pairs(pairs_.as<int32_t>(), DType::kI32),
                                 pairs(pairs_.as<float>() + n_pairs, DType::kF32)}});
  p_.gpu.add_to(ticket, y);
  p_.stream.copy(y.data, n * row_bytes(c_), sums_of_host_.as<void>());
}

// Its first rows, [n, dim].
TensorView CudaServedExperts::rows_in(const gpu::Buffer& buffer, int64_t n) const {
  return {buffer.as<float>(), n, c_.dim, c_.dim, DType::kF32};
}

}  // namespace tandem
