// A layer small enough to compute its attention in all five orders, with the matrix products that
// the materialised variant needs.
#pragma once
#include <gtest/gtest.h>

#include "bench/parts/attention_variants.h"
#include "bench/random_inputs.h"

namespace tandem {

inline ModelConfig small_attention_config() {
  ModelConfig c = bench_config("r1");
  c.dim = 192;
  c.vocab = 64;
  c.n_layers = c.n_dense_layers = 1;
  c.dense_dim = 64;
  c.mla = {.n_heads = 3, .q_rank = 96, .kv_rank = 64, .nope_dim = 32, .rope_dim = 16, .v_dim = 24};
  return c;
}

// Float matrices in the layout of the kernels.
struct PackedMatrices {
  PackedMatrices(const cpu::KernelTable& kernels, std::vector<TensorView> matrices)
      : home(kernels) {
    int64_t bytes = 0;
    for (const TensorView& m : matrices) bytes += home.packed_bytes({.q = m, .scale = {}});
    home.allocate(bytes);
    for (const TensorView& m : matrices) {
      views.push_back(home.reserve({.q = m, .scale = {}}));
      home.pack(m.data, views.back(), 0, m.rows);
    }
  }
  CpuWeights home;
  std::vector<QuantView> views;
};

// The columns of the products of a layer's matrices, computed by multiplying with unit vectors.
struct AttentionProducts {
  AttentionProducts(const cpu::KernelTable& kernels, const ModelConfig& c,
                    const AttentionWeights& w, Team& team) {
    const MlaConfig& m = c.mla;
    const int64_t heads = m.n_heads, latents = heads * m.kv_rank, rope = heads * m.rope_dim;
    const int most = static_cast<int>(std::max<int64_t>(m.q_rank, m.kv_rank));
    CpuOps ops(kernels, c, most, team);
    TensorView unit, q, columns, x, o, y;
    arena = Arena::holding([&](auto visit) {
      visit(unit, m.q_rank, m.q_rank, DType::kF32);
      visit(q, m.q_rank, heads * m.qk_dim(), DType::kF32);
      visit(columns, m.q_rank * heads, m.kv_rank, DType::kF32);
      visit(x, m.kv_rank * heads, m.kv_rank, DType::kF32);
      visit(o, m.kv_rank, heads * m.v_dim, DType::kF32);
      visit(y, m.kv_rank, c.dim, DType::kF32);
      visit(q_latent, latents, m.q_rank, DType::kF32);
      visit(q_rope, rope, m.q_rank, DType::kF32);
      visit(out, c.dim, latents, DType::kF32);
    });
    LinearPerHead through_kv_b{
        .x = q.reshape(m.q_rank * heads, m.qk_dim()).cols_from(0, m.nope_dim),
        .w = w.kv_b,
        .n_heads = m.n_heads,
        .first_row = 0,
        .rows_per_head = m.nope_dim + m.v_dim,
        .transposed = true,
        .out = columns};
    for (int i = 0; i < m.q_rank; ++i) unit.row<float>(i)[i] = 1;
    ops.linear(unit, w.q_b, q);
    ops.linear_per_head(through_kv_b);
    for (int i = 0; i < m.q_rank; ++i)
      for (int64_t h = 0; h < heads; ++h) {
        for (int r = 0; r < m.kv_rank; ++r)
          q_latent.row<float>(h * m.kv_rank + r)[i] = columns.row<float>(i * heads + h)[r];
        for (int r = 0; r < m.rope_dim; ++r)
          q_rope.row<float>(h * m.rope_dim + r)[i] =
              q.row<float>(i)[h * m.qk_dim() + m.nope_dim + r];
      }
    through_kv_b.x = x;
    through_kv_b.first_row = m.nope_dim;
    through_kv_b.transposed = false;
    through_kv_b.out = o.reshape(m.kv_rank * heads, m.v_dim);
    for (int64_t h = 0; h < heads; ++h) {
      std::fill_n(x.row<float>(0), x.rows * x.cols, 0.f);
      for (int r = 0; r < m.kv_rank; ++r) x.row<float>(r * heads + h)[r] = 1;
      ops.linear_per_head(through_kv_b);
      ops.linear(o, w.o, y);
      for (int r = 0; r < m.kv_rank; ++r)
        for (int64_t i = 0; i < c.dim; ++i)
          out.row<float>(i)[h * m.kv_rank + r] = y.row<float>(r)[i];
    }
  }
  Arena arena;
  TensorView q_latent, q_rope, out;
};

// Row v of y is the result of variant v.
inline void expect_equal_rows(TensorView y, float tolerance) {
  float largest = 0;
  for (int64_t i = 0; i < y.cols; ++i) largest = std::max(largest, std::abs(y.row<float>(0)[i]));
  EXPECT_GT(largest, 0.01f);
  for (int v = 1; v < kNumAttentionVariants; ++v)
    for (int64_t i = 0; i < y.cols; ++i)
      ASSERT_NEAR(y.row<float>(v)[i], y.row<float>(0)[i], tolerance * largest)
          << name_of(static_cast<AttentionVariant>(v)) << ", number " << i;
}

}  // namespace tandem
