// The five orders in which attention can be computed give the same result.
#include "attention_variant_case.h"

namespace tandem {
namespace {

void expect_all_equal(cpu::Isa isa, float tolerance) {
  const cpu::KernelTable kernels = cpu::kernels_for(isa);
  const ModelConfig config = small_attention_config();
  Team team(0);
  CpuWeights home(kernels);
  const ModelWeights weights = random_weights(
      config, {{DType::kF32}, {DType::kF32}},
      [](const WeightSpec& spec) { return spec.layer == 0; }, home, team);
  const AttentionWeights& w = weights.layers[0].attn;
  const AttentionProducts products(kernels, config, w, team);
  const PackedMatrices packed(kernels, {products.q_latent, products.q_rope, products.out});
  const Materialized materialized{packed.views[0], packed.views[1], packed.views[2]};

  constexpr int kContext = 150;
  const KvCache cache(config, kContext, cache_type_for(kernels));
  fill_with_random(cache, config);
  const std::vector<int32_t> pages = {2, 0, 1};
  const KvCache heads =
      cache_of_heads(kernels, config, w.kv_b, cache.layer(0), pages, kContext, team);
  CpuOps ops(kernels, config, AttentionVariants::max_tokens(config.mla), team);
  CpuDevice device(team);
  AttentionVariants variants(config, w, materialized, cache.layer(0), pages, heads.layer(0),
                             kContext, ops, device);
  TensorView h, y;
  const Arena arena = Arena::holding([&](auto visit) {
    visit(h, 1, config.dim, DType::kF32);
    visit(y, kNumAttentionVariants, config.dim, DType::kF32);
  });
  fill_with_normal(h);
  for (int v = 0; v < kNumAttentionVariants; ++v)
    variants.run(static_cast<AttentionVariant>(v), h, y.rows_from(v, 1));
  expect_equal_rows(y, tolerance);
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
  // Totals in GFLOP at a context of 4096.
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

// Matrices of more than 2^31 numbers, and contexts with more than 2^31 operations.
TEST(AttentionVariants, OperationsBeyondTwoBillion) {
  ModelConfig wide = bench_config("r1");
  wide.dim = 1 << 21;
  const auto cost = [&](AttentionVariant v, int64_t context) {
    return cost_of_variant(v, wide, {DType::kBF16}, context, 2);
  };
  const Cost none = cost(AttentionVariant::kCD, 0);
  // From and to the model's dimension: 1536 queries, 576 numbers of the cache, 128 heads of 128.
  const int64_t outer = (int64_t{1536 + 576 + 16'384}) << 21;
  // 24576 queries by 1536, 32768 keys and values by 512.
  const int64_t inner = 24'576 * 1'536 + 32'768 * 512;
  EXPECT_EQ(none.ops, 2 * (outer + inner));
  EXPECT_EQ(none.bytes, 2 * (outer + inner));
  const Cost long_one = cost(AttentionVariant::kCD, 1'000'000);
  EXPECT_EQ(long_one.ops - none.ops, 81'920'000'000);
  EXPECT_EQ(long_one.bytes - none.bytes, 81'920'000'000);
}

}  // namespace
}  // namespace tandem
