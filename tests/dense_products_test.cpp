// Dense products by a provider beside the kernels: oneDNN's within the bound of the arithmetic, the
// rearranged weights, and the choice between both at load.
#include "ops/dense_products.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <limits>

#include "loader/dense_choice.h"
#include "tests/check_close.h"
#include "tests/error_of.h"
#include "tests/fake_clock.h"
#include "tests/fake_provider.h"
#include "tests/naive_deepseek.h"
#include "tests/random_model.h"
#include "tests/small_config.h"

namespace tandem {
namespace {

using test::RandomModel;
using test::TestEngine;
using test::value;

// Dimensions of which some suit providers: [128, 128] of queries, the output of attention and the
// shared expert, [192, 128] of the dense layer and the head, but not [128, 192], [80, 128].
ModelConfig config() {
  ModelConfig c = small_config();
  c.dim = c.expert_dim = 128;
  c.vocab = c.dense_dim = 192;
  c.mla = {.n_heads = 4, .q_rank = 128, .kv_rank = 64, .nope_dim = 16, .rope_dim = 16, .v_dim = 32};
  return c;
}

std::vector<int32_t> prompt(int n) {
  std::vector<int32_t> tokens(n);
  for (int i = 0; i < n; ++i) tokens[i] = i * 37 % config().vocab;
  return tokens;
}

int n_threads_of_process() {
  int n = 0;
  for ([[maybe_unused]] const auto& task : std::filesystem::directory_iterator("/proc/self/task"))
    ++n;
  return n;
}

// A product of n float rows with [rows, cols] weights, by `provider` if it takes them.
class ProvidedProduct {
 public:
  ProvidedProduct(const cpu::KernelTable& kernels, const ModelConfig& c, Team& team, int max_rows)
      : home_(kernels), ops_(kernels, c, max_rows, team), team_(team) {}

  std::vector<float> run(const QuantView& stored, const TensorView& x, ProductProvider& provider) {
    home_.allocate(home_.packed_bytes(stored));
    const QuantView packed = home_.reserve(stored);
    home_.pack(stored.q.data, packed, 0, stored.q.rows);
    interleave(packed.q, team_);
    ops_.use(&provider, {packed.q.data});
    std::vector<float> out(x.rows * stored.q.rows, std::numeric_limits<float>::quiet_NaN());
    ops_.linear(x, packed, {out.data(), x.rows, stored.q.rows, stored.q.rows, DType::kF32});
    return out;
  }

 private:
  CpuWeights home_;
  CpuOps ops_;
  Team& team_;
};

// Sums of k products in float, in any order, differ from double precision by at most k eps of the
// sum of their magnitudes. Activations of BF16 weights are rounded to BF16 before.
void expect_within_bound(ProductProvider& provider, const cpu::KernelTable& kernels, DType dtype,
                         int64_t rows, int cols, const std::vector<int>& counts) {
  RandomModel numbers(config(), DType::kBF16);
  const QuantView w = numbers.matrix(rows, cols, dtype);
  ModelConfig c = config();
  c.dense_dim = cols;
  Team team(2);
  ProvidedProduct product(kernels, c, team, counts.back());
  for (const int n : counts) {
    std::vector<float> x(static_cast<size_t>(n) * cols);
    std::normal_distribution<float> normal;
    for (float& v : x) v = std::bit_cast<float>(uint32_t{test::to_bf16(normal(numbers.rng))} << 16);
    const std::vector<float> got = product.run(w, {x.data(), n, cols, cols, DType::kF32}, provider);
    for (int i = 0; i < n; ++i)
      for (int64_t r = 0; r < rows; ++r) {
        double want = 0, magnitude = 0;
        for (int k = 0; k < cols; ++k) {
          const double one = x[static_cast<size_t>(i) * cols + k] * value(w, r, k);
          want += one;
          magnitude += std::abs(one);
        }
        ASSERT_NEAR(got[i * rows + r], want, cols * 0x1p-24 * magnitude)
            << n << " rows of " << cols << ", row " << i << ", output " << r;
      }
  }
}

TEST(DenseProducts, OneDnnIsWithinTheBound) {
  std::string why_not;
  const int before = n_threads_of_process();
  const auto onednn = open_onednn(onednn_names(), 2, why_not);
  if (!onednn) GTEST_SKIP() << why_not;
  EXPECT_EQ(onednn->name().rfind("oneDNN ", 0), 0u) << onednn->name();
  const cpu::KernelTable kernels = cpu::kernels_for(cpu::best_isa());
  int n_types = 0;
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    for (const int cols : {128, 640, 2048}) {
      const TensorView shape = {nullptr, 192, cols, cols, dtype};
      if (!can_interleave(kernels, shape) || !onednn->prepare(dtype, cols)) continue;
      ++n_types;
      // Every primitive, and sums of several.
      const std::vector<int> counts =
          cols == 128 ? std::vector{1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11,  12,  13,
                                    14, 15, 16, 17, 31, 33, 48, 63, 64, 95, 128, 257, 300}
                      : std::vector{1, 5, 19};
      expect_within_bound(*onednn, kernels, dtype, 192, cols, counts);
    }
  }
  EXPECT_EQ(n_threads_of_process(), before) << "oneDNN computes on the team's threads alone";
  // oneDNN has fast products of both types with AVX-512, whatever this program's kernels need.
  if (cpu::best_isa() != cpu::Isa::kReference && __builtin_cpu_supports("avx512f"))
    EXPECT_GT(n_types, 0);
  else if (n_types == 0)
    GTEST_SKIP() << "no fast product on this CPU";
}

TEST(DenseProducts, OtherLibrariesAreRefused) {
  std::string why_not;
  const char* const kMissing[] = {"libmissing.so.1"};
  EXPECT_FALSE(open_onednn(kMissing, 1, why_not));
  EXPECT_TRUE(says(why_not, "oneDNN"));
  const char* const kOther[] = {"libmissing.so.1", "libc.so.6"};
  EXPECT_FALSE(open_onednn(kOther, 1, why_not));
  EXPECT_TRUE(says(why_not, "oneDNN"));
}

class ProviderTest : public testing::Test {
 protected:
  void SetUp() override {
    if (cpu::best_isa() < cpu::Isa::kAvx2) GTEST_SKIP() << "no panels on this CPU";
  }
  std::string choose(TestEngine& engine, DenseProducts wanted, int max_tokens = 256) {
    return choose_products(
        {config_, engine.packed.weights, engine.kernels, engine.ops, engine.team, max_tokens},
        provider_, wanted);
  }
  const ModelConfig config_ = config();
  FakeProvider provider_;
};

TEST_F(ProviderTest, InterleavedPanelsHoldTheSameNumbers) {
  const cpu::KernelTable kernels = cpu::kernels_for(cpu::Isa::kAvx2);
  expect_within_bound(provider_, kernels, DType::kF32, 128, 128, {1, 3});
  EXPECT_EQ(provider_.n_calls, 4) << "two pieces of two products";
}

TEST_F(ProviderTest, OnlyWholePiecesOfMatchingTypesAreTaken) {
  const cpu::KernelTable avx2 = cpu::kernels_for(cpu::Isa::kAvx2);
  const auto can = [](const cpu::KernelTable& kernels, DType dtype, int64_t rows, int64_t cols) {
    return can_interleave(kernels, {nullptr, rows, cols, cols, dtype});
  };
  EXPECT_TRUE(can(avx2, DType::kF32, 64, 128));
  EXPECT_FALSE(can(avx2, DType::kF32, 80, 128));
  EXPECT_FALSE(can(avx2, DType::kF32, 64, 192));
  EXPECT_FALSE(can(avx2, DType::kBF16, 64, 128)) << "its activations are floats";
  EXPECT_FALSE(can(avx2, DType::kF8E4M3, 64, 128));
  EXPECT_FALSE(can(cpu::kernels_for(cpu::Isa::kReference), DType::kF32, 64, 128)) << "no panels";
}

// All matrices that the provider takes are its, in a model that computes the same.
TEST_F(ProviderTest, AModelWithAllItsProducts) {
  RandomModel model(config(), DType::kF32);
  const std::vector<int32_t> tokens = prompt(20), pages = {3};
  const auto want = test::naive_logits(model.config, model.stored, tokens);
  for (const AttentionForm form : {AttentionForm::kAbsorbed, AttentionForm::kNaive}) {
    TestEngine engine(model, cpu::Isa::kAvx2, form);
    EXPECT_EQ(choose(engine, DenseProducts::kOneDnn),
              "a provider for [128, 128], [192, 128]; tandem's kernels for the others");
    provider_.n_calls = 0;
    const auto got = engine.run(tokens, 20, pages);
    for (size_t t = 0; t < want.size(); ++t)
      test::expect_close(got[t], want[t], 1e-4 * test::largest(want[t]));
    // Each layer has q_a, q_b and o of two pieces; the dense layer gate and up of three, the other
    // a shared expert of three matrices; and the head has three.
    EXPECT_EQ(provider_.n_calls, 2 * 3 * 2 + 2 * 3 + 3 * 2 + 3);
  }
}

// A product takes the kernels 16 us, and the provider so much more for each of the two or three
// pieces.
TEST_F(ProviderTest, TheFasterComputesAShape) {
  RandomModel model(config(), DType::kF32);
  const std::vector<int32_t> tokens = prompt(5), pages = {0};
  const auto want = test::naive_logits(model.config, model.stored, tokens);
  const FakeClock clock(std::chrono::microseconds(16), false);
  const auto chosen = [&](int max_tokens, auto microseconds_more) {
    TestEngine engine(model, cpu::Isa::kAvx2, AttentionForm::kAbsorbed);
    provider_.on_call = [&](const cpu::GemmArgs& a) {
      FakeClock::advance(std::chrono::microseconds(microseconds_more(a)));
    };
    const std::string text = choose(engine, DenseProducts::kFastest, max_tokens);
    provider_.on_call = [](const cpu::GemmArgs&) {};
    const auto got = engine.run(tokens, 5, pages);
    for (size_t t = 0; t < want.size(); ++t)
      test::expect_close(got[t], want[t], 1e-4 * test::largest(want[t]));
    return text;
  };
  EXPECT_EQ(chosen(4, [](const cpu::GemmArgs&) { return 1; }),
            "tandem's kernels, faster than a provider");
  EXPECT_EQ(chosen(4, [](const cpu::GemmArgs&) { return -1; }),
            "a provider for [128, 128], [192, 128]; tandem's kernels for the others");
  // 26 us with one row, 8 with four; of three pieces 31 and 4.
  EXPECT_EQ(chosen(4, [](const cpu::GemmArgs& a) { return a.m == 1 ? 5 : -4; }),
            "a provider for [128, 128], [192, 128]; tandem's kernels for the others");
  // Four rows are not measured where a step has at most three tokens.
  EXPECT_EQ(chosen(3, [](const cpu::GemmArgs& a) { return a.m == 1 ? 5 : -4; }),
            "tandem's kernels, faster than a provider");
  // 18 us, and 10 with 256 rows; of three pieces 19 and 7: (18 / 16)^4 10 / 16 is just above 1.
  EXPECT_EQ(chosen(256, [](const cpu::GemmArgs& a) { return a.m == 256 ? -3 : 1; }),
            "a provider for [192, 128]; tandem's kernels for the others");
}

TEST_F(ProviderTest, NothingToTakeIsAnError) {
  RandomModel model(config(), DType::kF32);
  TestEngine engine(model, cpu::Isa::kAvx2, AttentionForm::kAbsorbed);
  provider_.takes = [](DType, int64_t) { return false; };
  EXPECT_EQ(error_of([&] { choose(engine, DenseProducts::kOneDnn); }),
            "--dense-products onednn: a provider has no fast product for a dense matrix of this "
            "model as the avx2 kernels keep it: leave it out");
  EXPECT_EQ(
      choose(engine, DenseProducts::kFastest),
      "tandem's kernels: a provider has no fast product for a dense matrix of this model as the "
      "avx2 kernels keep it");
  for (const auto& [dtype, cols] : provider_.prepared) {
    EXPECT_EQ(dtype, DType::kF32);
    EXPECT_EQ(cols, 128);
  }
}

}  // namespace
}  // namespace tandem
