#include "offload/gpu/cuda_even_batch.h"

#include <algorithm>

namespace tandem {
namespace {

gpu::Buffer numbers(int64_t n) { return {n * int64_t{sizeof(float)}, gpu::Site::kMapped}; }

TensorView rows_of(const gpu::Buffer& b, int n, int64_t cols, DType dtype) {
  return {b.as<void>(), n, cols, cols, dtype};
}

}  // namespace

EvenBatch::EvenBatch(const ModelConfig& config, int max_tokens, std::span<const int> experts)
    : c_(config) {
  const int64_t pairs = int64_t{max_tokens} * config.router.n_active,
                values = int64_t{max_tokens} * config.dim;
  x_ = numbers(values);
  y_ = numbers(values);
  ids_ = numbers(pairs);
  weights_ = numbers(pairs);
  std::fill_n(x_.as<float>(), values, 0.01f);
  std::fill_n(y_.as<float>(), values, 0.f);
  std::fill_n(weights_.as<float>(), pairs, 1.f);
  for (int64_t i = 0; i < pairs; ++i) ids_.as<int32_t>()[i] = experts[i % experts.size()];
}

ExpertBatch EvenBatch::of(int layer, int n) const {
  const int n_active = c_.router.n_active;
  return {layer,
          rows_of(x_, n, c_.dim, DType::kF32),
          {rows_of(ids_, n, n_active, DType::kI32), rows_of(weights_, n, n_active, DType::kF32)}};
}

TensorView EvenBatch::y(int n) const { return rows_of(y_, n, c_.dim, DType::kF32); }

}  // namespace tandem
