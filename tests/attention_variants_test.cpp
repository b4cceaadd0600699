// The five orders of computing attention give the same result.
#include "bench/attention_variants.h"

#include <gtest/gtest.h>

#include <random>

#include "bench/random_cache.h"

namespace tandem {
namespace {

ModelConfig small_config() {
  ModelConfig c = bench_config("r1");
  c.dim = 192;
  c.vocab = 64;
  c.n_layers = c.n_dense_layers = 1;
  c.dense_dim = 64;
  c.mla = {.n_heads = 3, .q_rank = 96, .kv_rank = 64, .nope_dim = 32, .rope_dim = 16, .v_dim = 24};
  return c;
}

// Matrices of floats as kernels want them.
struct Packed {
  Packed(const cpu::KernelTable& kernels, std::vector<TensorView> matrices) : home(kernels) {
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

// Products of a layer's matrices with unit vectors are their columns.
struct Products {
  Products(const cpu::KernelTable& kernels, const ModelConfig& c, const AttentionWeights& w,
           Team& team) {
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

void expect_all_equal(cpu::Isa isa, float tolerance) {
  const cpu::KernelTable kernels = cpu::kernels_for(isa);
  const ModelConfig config = small_config();
  Team team(0);
  CpuWeights home(kernels);
  const ModelWeights weights = random_weights(
      config, {{DType::kF32}, {DType::kF32}},
      [](const WeightSpec& spec) { return spec.layer == 0; }, home, team);
  const AttentionWeights& w = weights.layers[0].attn;
  const Products products(kernels, config, w, team);
  const Packed packed(kernels, {products.q_latent, products.q_rope, products.out});
  const Materialized materialized{packed.views[0], packed.views[1], packed.views[2]};

  constexpr int kContext = 150;
  KvCache cache(config, kContext, cache_type_for(kernels));
  fill_with_random(cache, config);
  const std::vector<int32_t> pages = {2, 0, 1};
  AttentionVariants variants(kernels, config, w, materialized, cache, pages, kContext, team);
  TensorView h, y;
  const Arena arena = Arena::holding([&](auto visit) {
    visit(h, 1, config.dim, DType::kF32);
    visit(y, kNumAttentionVariants, config.dim, DType::kF32);
  });
  std::mt19937 rng(1);
  std::normal_distribution<float> normal;
  for (int i = 0; i < config.dim; ++i) h.row<float>(0)[i] = normal(rng);
  for (int v = 0; v < kNumAttentionVariants; ++v)
    variants.run(static_cast<AttentionVariant>(v), h, y.rows_from(v, 1));

  float largest = 0;
  for (int i = 0; i < config.dim; ++i) largest = std::max(largest, std::abs(y.row<float>(0)[i]));
  EXPECT_GT(largest, 0.01f);
  for (int v = 1; v < kNumAttentionVariants; ++v)
    for (int i = 0; i < config.dim; ++i)
      ASSERT_NEAR(y.row<float>(v)[i], y.row<float>(0)[i], tolerance * largest)
          << name_of(static_cast<AttentionVariant>(v)) << ", number " << i;
}

TEST(AttentionVariants, AgreeInFloat) { expect_all_equal(cpu::Isa::kReference, 1e-4f); }
TEST(AttentionVariants, AgreeWithABf16Cache) { expect_all_equal(cpu::best_isa(), 2e-2f); }

TEST(AttentionVariants, OperationsOfR1) {
  const ModelConfig r1 = bench_config("r1");
  const auto ops = [&](AttentionVariant v, int64_t context) {
    return cost_of_variant(v, r1, {DType::kBF16}, context, 2).ops;
  };
  const auto per_token = [&](AttentionVariant v) { return ops(v, 1001) - ops(v, 1000); };
  EXPECT_EQ(per_token(AttentionVariant::kCD), 81'920);
  EXPECT_EQ(per_token(AttentionVariant::kCC), 33'636'352);
  EXPECT_EQ(per_token(AttentionVariant::kACC), 278'528);
  EXPECT_EQ(per_token(AttentionVariant::kACCME), 278'528);
  EXPECT_EQ(per_token(AttentionVariant::kAMCCME), 278'528);
  // In all, in GFLOP, a context of 4096.
  EXPECT_NEAR(static_cast<double>(ops(AttentionVariant::kCD, 4096)) * 1e-9, 0.710, 5e-4);
  EXPECT_NEAR(static_cast<double>(ops(AttentionVariant::kCC, 4096)) * 1e-9, 138.1, 0.05);
  EXPECT_NEAR(static_cast<double>(ops(AttentionVariant::kACCME, 4096)) * 1e-9, 1.515, 5e-4);
  EXPECT_NEAR(static_cast<double>(ops(AttentionVariant::kAMCCME, 4096)) * 1e-9, 2.337, 5e-4);
  const auto bytes_per_token = [&](AttentionVariant v) {
    return cost_of_variant(v, r1, {DType::kBF16}, 1001, 2).bytes -
           cost_of_variant(v, r1, {DType::kBF16}, 1000, 2).bytes;
  };
  EXPECT_EQ(bytes_per_token(AttentionVariant::kCD), 81'920);
  EXPECT_EQ(bytes_per_token(AttentionVariant::kACCME), 1'152);
}

}  // namespace
}  // namespace tandem
