// The self-test passes with this machine's kernels and notices kernels that are wrong.
#include "bench/self_test.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "tests/small_config.h"

namespace tandem {
namespace {

const cpu::KernelTable& good() {
  static const cpu::KernelTable table = cpu::kernels_for(cpu::best_isa());
  return table;
}

std::vector<SelfTestRow> rows_of(const cpu::KernelTable& kernels) {
  const ModelConfig config = small_r1();
  Team team(2);
  std::vector<SelfTestRow> rows;
  self_test({config, {{DType::kF8E4M3}, {DType::kBF16}}, {&kernels, 1}, {}}, team,
            [&](const SelfTestRow& row) { rows.push_back(row); });
  return rows;
}

TEST(SelfTest, ComparesKernelsWithTheReference) {
  const std::vector<SelfTestRow> rows = rows_of(good());
  ASSERT_EQ(rows.size(), 2u);
  for (const SelfTestRow& row : rows) {
    EXPECT_EQ(row.device, "cpu");
    EXPECT_EQ(row.n_rows, 2);
    EXPECT_EQ(row.vocab, small_r1().vocab);
    EXPECT_TRUE(row.passed()) << row.kernels << " " << row.error;
    EXPECT_GT(row.seconds, 0);
  }
  EXPECT_EQ(rows[0].kernels, "reference");
  EXPECT_EQ(rows[0].error, 0);
  EXPECT_EQ(rows[1].kernels, good().name);
  EXPECT_LT(rows[1].error, 0.04);
}

// The error is the largest difference of a logit, over the largest difference that layers make.
// This fault has always the same, as only reference kernels compute.
TEST(SelfTest, MeasuresTheError) {
  static const cpu::KernelTable reference = cpu::kernels_for(cpu::Isa::kReference);
  cpu::KernelTable wrong = reference;
  wrong.silu_mul = [](const cpu::SiluMulArgs& a) {
    reference.silu_mul(a);
    for (int64_t i = 0; i < a.n; ++i) a.out[i] *= 1.05f;
  };
  const SelfTestRow row = rows_of(wrong).back();
  EXPECT_EQ(row.bound, 0.06);
  EXPECT_NEAR(row.error, 0.049854, 1e-4);
  EXPECT_TRUE(row.passed());
  SelfTestRow limit = {.finite = true, .error = 0.06, .bound = 0.06};
  EXPECT_TRUE(limit.passed());
  limit.error = 0.0601;
  EXPECT_FALSE(limit.passed());
  limit = {.finite = false, .error = 0, .bound = 0.06};
  EXPECT_FALSE(limit.passed());
}

struct Fault {
  const char* name;
  void (*plant)(cpu::KernelTable& kernels);
  bool finite = true;
};

class SelfTestFaults : public testing::TestWithParam<Fault> {};

TEST_P(SelfTestFaults, AreSeen) {
  cpu::KernelTable kernels = good();
  GetParam().plant(kernels);
  const SelfTestRow row = rows_of(kernels).back();
  EXPECT_FALSE(row.passed()) << row.error;
  EXPECT_EQ(row.finite, GetParam().finite);
}

const Fault kFaults[] = {
    {"ARowOfEachProductMissing",
     [](cpu::KernelTable& kernels) {
       kernels.gemm = [](const cpu::GemmArgs& a) {
         good().gemm(a);
         for (int i = 0; i < a.m; ++i) a.out[i * a.out_stride + a.n - 1] = 0;
       };
     }},
    {"TheGateWithoutSilu",
     [](cpu::KernelTable& kernels) {
       kernels.silu_mul = [](const cpu::SiluMulArgs& a) {
         for (int i = 0; i < a.n; ++i) a.out[i] = a.gate[i] * a.up[i];
       };
     }},
    {"ScoresOfAttentionTwiceAsLarge",
     [](cpu::KernelTable& kernels) {
       kernels.attend = [](const cpu::AttendArgs& a) {
         cpu::AttendArgs wrong = a;
         wrong.scale *= 2;
         good().attend(wrong);
       };
     }},
    {"TheLastKeyUnseen",
     [](cpu::KernelTable& kernels) {
       kernels.attend = [](const cpu::AttendArgs& a) {
         std::vector<cpu::KeyBlock> blocks(a.blocks, a.blocks + a.n_blocks);
         for (cpu::KeyBlock& block : blocks) block.n_keys = std::max(1, block.n_keys - 1);
         cpu::AttendArgs wrong = a;
         wrong.blocks = blocks.data();
         good().attend(wrong);
       };
     }},
    {"NotANumber",
     [](cpu::KernelTable& kernels) {
       kernels.rms_norm = [](const cpu::RmsNormArgs& a) {
         good().rms_norm(a);
         a.out[a.n / 2] = std::numeric_limits<float>::quiet_NaN();
       };
     },
     false},
};
INSTANTIATE_TEST_SUITE_P(Kernels, SelfTestFaults, testing::ValuesIn(kFaults),
                         [](const auto& fault) { return fault.param.name; });

}  // namespace
}  // namespace tandem
