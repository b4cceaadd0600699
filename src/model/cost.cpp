#include "model/cost.h"

#include <algorithm>

#include "core/rounding.h"
#include "core/tensor.h"
#include "model/attention_form.h"
#include "model/kv_layout.h"
#include "model/parameters.h"

namespace tandem {

WeightFormat stored_format(const ModelConfig& c) {
  return {c.scale_block > 0 ? DType::kF8E4M3 : DType::kBF16};
}

WeightFormat stored_expert_format(const ModelConfig& c) {
  return c.expert_group > 0 ? WeightFormat{DType::kI4, c.expert_group} : stored_format(c);
}

int scale_block_of(const ModelConfig& c) {
  constexpr int kDefault = 128;
  return c.scale_block > 0 ? c.scale_block : kDefault;
}

int64_t matrix_bytes(const ModelConfig& c, int64_t rows, int64_t cols, WeightFormat format) {
  const int64_t block = scale_block_of(c);
  int64_t scale_bytes = 0;
  if (format.dtype == DType::kF8E4M3)
    scale_bytes = ceil_div(rows, block) * ceil_div(cols, block) * kFloatBytes;
  if (format.dtype == DType::kI8) scale_bytes = rows * kFloatBytes;
  if (format.dtype == DType::kI4) scale_bytes = rows * ceil_div(cols, format.group) * kBf16Bytes;
  if (format.dtype == DType::kI4TwoLevel)
    scale_bytes = rows * (ceil_div(cols, format.group) + kFloatBytes);
  return rows * cols * bits_of(format.dtype) / 8 + scale_bytes;
}

int64_t routed_expert_bytes(const ModelConfig& c, WeightFormat format) {
  return 2 * matrix_bytes(c, c.expert_dim, c.dim, format) +
         matrix_bytes(c, c.dim, c.expert_dim, format);
}

BackboneBytes backbone_layer_bytes(const ModelConfig& c, bool moe, WeightFormat format) {
  const MlaConfig& a = c.mla;
  const auto matrix = [&](int64_t rows, int64_t cols) {
    return matrix_bytes(c, rows, cols, format);
  };
  const int64_t heads = a.n_heads;
  BackboneBytes b;
  b.attention = matrix(a.cache_dim(), c.dim) + matrix(heads * (a.nope_dim + a.v_dim), a.kv_rank) +
                matrix(c.dim, heads * a.v_dim);
  b.attention += a.q_rank == 0 ? matrix(heads * a.qk_dim(), c.dim)
                               : matrix(a.q_rank, c.dim) + matrix(heads * a.qk_dim(), a.q_rank);
  b.norms = (2 * c.dim + a.q_rank + a.kv_rank) * kBf16Bytes;
  const auto ffn = [&](int64_t width) { return 2 * matrix(width, c.dim) + matrix(c.dim, width); };
  if (!moe) {
    b.dense = ffn(c.dense_dim);
    return b;
  }
  if (c.n_shared_experts > 0) b.shared = ffn(c.shared_dim());
  b.router = int64_t{c.router.n_experts} * c.dim * kBf16Bytes;
  if (c.router.has_bias()) b.norms += c.router.n_experts * size_of(DType::kF32);
  return b;
}

int64_t embedding_bytes(const ModelConfig& c) { return int64_t{c.vocab} * c.dim * kBf16Bytes; }

int64_t activation_values_per_token(const ModelConfig& c) {
  const int64_t stream = 4 * c.dim;
  const int64_t heads = int64_t{c.mla.n_heads} * (2 * c.mla.qk_dim() + c.mla.kv_rank + c.mla.v_dim);
  const int64_t ffn =
      2 * std::max<int64_t>(c.dense_dim, int64_t{c.router.n_active} * c.expert_dim + c.dim);
  return stream + std::max(heads, ffn);
}

TokenOps token_ops(const ModelConfig& c) {
  const MlaConfig& a = c.mla;
  const double heads = a.n_heads, dim = c.dim;
  TokenOps ops;
  ops.projections = 2 * (dim * a.cache_dim() + heads * a.v_dim * dim);
  ops.projections +=
      2 * (a.q_rank == 0 ? dim * heads * a.qk_dim() : a.q_rank * (dim + heads * a.qk_dim()));
  ops.dense = 6 * dim * c.dense_dim;
  ops.shared = 6 * dim * c.shared_dim();
  ops.router = 2 * dim * c.router.n_experts;
  ops.expert = 6 * dim * c.expert_dim;
  ops.head = 2 * dim * c.vocab;
  return ops;
}

AttentionWork attention_work(const ModelConfig& c, double queries, double context) {
  const AttentionOps ops = attention_ops(c.mla, queries, context);
  const bool naive = naive_is_cheaper(c.mla, queries, context);
  const auto bytes = static_cast<double>(kv_planes(c, 0, DType::kBF16).token_bytes());
  return {context * bytes, naive ? ops.naive : ops.absorbed, !naive};
}

RowBytes row_bytes(const ModelConfig& c, ExpertRows rows) {
  const RowFormats formats = row_formats(rows, true);
  return {encoded_bytes(formats.there, c.dim), encoded_bytes(formats.back, c.dim)};
}

}  // namespace tandem
