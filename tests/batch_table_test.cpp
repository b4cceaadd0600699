// Batch tables against counts by hand: a machine and a model with round figures.
#include "offload/plan/batch_table.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/planner_cases.h"

namespace tandem {
namespace {

// R1 with its experts on the CPU: 256 experts, 8 a token, each 44,040,192 parameters in FP8 with a
// float32 scale for each 128 x 128 block.
struct R1OnRoundMachine {
  ModelConfig config = known_model("r1");
  Machine machine = round_machine();
  Workload workload;
  RoutingStatistics routing{config};
  Placement placement = r1_with_experts_on_the_cpu();
  BatchTable table() const { return batch_table({config, machine, workload, routing}, placement); }
};

TEST(BatchTable, RowsArePowersOfTwo) {
  const BatchTable table = R1OnRoundMachine().table();
  ASSERT_EQ(table.rows.size(), 17u);
  for (size_t i = 0; i < table.rows.size(); ++i) EXPECT_EQ(table.rows[i].tokens, std::ldexp(1, i));
}

TEST(BatchTable, CountsExpertsBytesAndOperations) {
  const BatchTable table = R1OnRoundMachine().table();
  EXPECT_FALSE(table.on_gpu);
  EXPECT_DOUBLE_EQ(table.ridge_ops_per_byte, 10);  // 1 Tops/s, 100 GB/s
  constexpr double kParameters = 44'040'192;
  constexpr double kBytes = kParameters + kParameters / (128 * 128) * 4;
  for (const BatchRow& row : table.rows) {
    const double used = 256 * (1 - std::pow(1 - 8.0 / 256, row.tokens));
    EXPECT_DOUBLE_EQ(row.tokens_per_expert, row.tokens / 32);
    EXPECT_NEAR(row.experts_used, used, 1e-9 * used);
    const double intensity = row.tokens * 8 * 2 * kParameters / (used * kBytes);
    EXPECT_NEAR(row.ops_per_byte, intensity, 1e-9 * intensity);
    EXPECT_EQ(row.reading, intensity < 10);
  }
  EXPECT_TRUE(table.rows[7].reading);   // 128 tokens: 4 an expert, about 8 operations a byte
  EXPECT_FALSE(table.rows[8].reading);  // 256 tokens: 8 an expert, 16
}

TEST(BatchTable, StepsAreThoseOfThePrediction) {
  R1OnRoundMachine r1;
  const BatchTable table = r1.table();
  r1.workload.concurrency = 64;
  const Phase step = predict({r1.config, r1.machine, r1.workload, r1.routing}, r1.placement).decode;
  EXPECT_EQ(table.rows[6].step_seconds, step.step_seconds);
  EXPECT_EQ(table.rows[6].tokens_per_second, 64 / step.step_seconds);
  EXPECT_EQ(table.rows[6].longest, Part::kCpuExperts);
}

// 70,272 bytes a token: 8,192 of them are 0.576 GB. The GPU has 40 GB, of which the backbone takes
// 17.1.
TEST(BatchTable, SaysWhereTheCacheEnds) {
  R1OnRoundMachine r1;
  const auto most = [&] {
    double fitting = 0;
    for (const BatchRow& row : r1.table().rows)
      if (row.kv_fits) fitting = row.tokens;
    return fitting;
  };
  EXPECT_EQ(most(), 32);
  r1.workload.context = 16'384;
  EXPECT_EQ(most(), 16);
}

TEST(BatchTable, OnGpusItIsTheirRidge) {
  const Planned planned("v2-lite", known_machine("8xh200"));
  const Plan plan = planned.plan();
  const BatchTable table = batch_table(
      {planned.config, planned.machine, plan.workload, planned.routing}, plan.placement);
  EXPECT_TRUE(table.on_gpu);
  const Gpu& gpu = planned.machine.gpus[0];
  EXPECT_DOUBLE_EQ(table.ridge_ops_per_byte, gpu.peak.bf16 / gpu.read_bytes_per_second);
}

}  // namespace
}  // namespace tandem
