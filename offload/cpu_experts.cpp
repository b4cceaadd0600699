#include "offload/cpu_experts.h"

#include <algorithm>

#include "ops/cpu_weights.h"

namespace tandem {
namespace {

constexpr int kRows = 64;  // output rows that a thread takes at a time

int64_t scratch_bytes(const ModelConfig& c, int64_t max_tokens, int n_threads) {
  const int64_t pairs = max_tokens * c.router.n_active;
  int64_t bytes = 0;
  for (const int64_t n : {pairs * c.expert_dim, pairs * c.expert_dim, max_tokens * c.dim,
                          n_threads * max_tokens * kRows})
    bytes += Arena::padded_bytes(n * size_of(DType::kF32));
  return bytes;
}

}  // namespace

CpuExperts::CpuExperts(const cpu::KernelTable& kernels, const ModelConfig& config,
                       const ModelWeights& weights, int max_tokens, Team& team)
    : kernels_(kernels),
      c_(config),
      w_(weights),
      team_(team),
      first_of_(config.router.n_experts + 1),
      tokens_(int64_t{max_tokens} * config.router.n_active),
      pair_weights_(int64_t{max_tokens} * config.router.n_active),
      arena_(scratch_bytes(config, max_tokens, team.size())) {
  groups_.reserve(config.router.n_experts);
  const int64_t pairs = static_cast<int64_t>(tokens_.size());
  act_ = arena_.matrix(pairs, config.expert_dim, DType::kF32);
  up_ = arena_.matrix(pairs, config.expert_dim, DType::kF32);
  sum_ = arena_.matrix(max_tokens, config.dim, DType::kF32);
  part_ = arena_.matrix(int64_t{team.size()} * max_tokens, kRows, DType::kF32);
}

// Pieces of work are some rows of one expert (first pass) or some rows of every expert (second
// pass): no two threads write the same number, and each sum runs over the experts in ascending
// order.
void CpuExperts::submit(const ExpertBatch& batch) {
  n_tokens_ = static_cast<int>(batch.x.rows);
  group_by_expert(batch);
  const int64_t pieces = (c_.expert_dim + kRows - 1) / kRows;
  team_.run(static_cast<int64_t>(groups_.size()) * pieces, [&](int64_t i, int) {
    const int first = static_cast<int>(i % pieces) * kRows;
    activate(batch, groups_[i / pieces], first, std::min(kRows, c_.expert_dim - first));
  });
  team_.run((c_.dim + kRows - 1) / kRows, [&](int64_t i, int thread) {
    const int first = static_cast<int>(i) * kRows;
    project(first, std::min(kRows, c_.dim - first), part_.row<float>(thread * sum_.rows));
  });
}

void CpuExperts::add_to(TensorView y) {
  for (int t = 0; t < n_tokens_; ++t) {
    float* to = y.row<float>(t);
    const float* from = sum_.row<float>(t);
    for (int64_t i = 0; i < y.cols; ++i) to[i] += from[i];
  }
}

// Counting sort of the pairs by expert; tokens stay in order.
void CpuExperts::group_by_expert(const ExpertBatch& batch) {
  const int n_active = c_.router.n_active;
  std::fill(first_of_.begin(), first_of_.end(), 0);
  for (int t = 0; t < n_tokens_; ++t)
    for (int k = 0; k < n_active; ++k) ++first_of_[batch.routing.ids.row<int32_t>(t)[k] + 1];
  for (size_t e = 1; e < first_of_.size(); ++e) first_of_[e] += first_of_[e - 1];

  groups_.clear();
  for (int e = 0; e < c_.router.n_experts; ++e)
    if (const int n = first_of_[e + 1] - first_of_[e]; n > 0)
      groups_.push_back({&w_.layers[batch.layer].experts[e], first_of_[e], n});

  for (int t = 0; t < n_tokens_; ++t)
    for (int k = 0; k < n_active; ++k) {
      const int at = first_of_[batch.routing.ids.row<int32_t>(t)[k]]++;
      tokens_[at] = t;
      pair_weights_[at] = batch.routing.weights.row<float>(t)[k];
    }
}

// act = silu(gate x) * (up x) on some rows of one expert, for its tokens.
void CpuExperts::activate(const ExpertBatch& batch, const Group& group, int first_row, int n_rows) {
  const auto product = [&](const QuantView& w, TensorView out) {
    kernels_.gemm({.x = batch.x.row<float>(0),
                   .x_stride = batch.x.stride,
                   .x_rows = tokens_.data() + group.first,
                   .w = kernel_weight(w),
                   .first_row = first_row,
                   .out = out.row<float>(group.first) + first_row,
                   .out_stride = out.stride,
                   .m = group.n,
                   .n = n_rows,
                   .k = c_.dim});
  };
  product(group.weights->gate, act_);
  product(group.weights->up, up_);
  for (int i = group.first; i < group.first + group.n; ++i) {
    float* gate = act_.row<float>(i) + first_row;
    kernels_.silu_mul({gate, up_.row<float>(i) + first_row, gate, n_rows});
  }
}

// sum[t] = sum over experts of weight * (down act) on some rows of every expert's output.
void CpuExperts::project(int first_row, int n_rows, float* part) {
  for (int t = 0; t < n_tokens_; ++t) std::fill_n(sum_.row<float>(t) + first_row, n_rows, 0.f);
  for (const Group& group : groups_) {
    kernels_.gemm({.x = act_.row<float>(group.first),
                   .x_stride = act_.stride,
                   .x_rows = nullptr,
                   .w = kernel_weight(group.weights->down),
                   .first_row = first_row,
                   .out = part,
                   .out_stride = kRows,
                   .m = group.n,
                   .n = n_rows,
                   .k = c_.expert_dim});
    for (int i = 0; i < group.n; ++i) {
      float* to = sum_.row<float>(tokens_[group.first + i]) + first_row;
      const float weight = pair_weights_[group.first + i];
      for (int r = 0; r < n_rows; ++r) to[r] += weight * part[i * kRows + r];
    }
  }
}

}  // namespace tandem
