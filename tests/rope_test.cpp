// Frequencies and softmax scales by the formulas of YaRN (arXiv 2309.00071, sections 3.2 and 3.4)
// with the constants of modeling_deepseek.py, and a vector rotated in adjacent pairs (RoFormer,
// arXiv 2104.09864, section 3.2.2; apply_rotary_emb() in inference/model.py).
#include "model/rope.h"

#include <numeric>

#include "ops/cpu_ops.h"
#include "tests/check_close.h"

namespace tandem {
namespace {

using test::expect_close;

ModelConfig kimi_k2() {
  ModelConfig c;
  c.rope.theta = 50000;
  c.rope.factor = 32;
  c.rope.beta_fast = c.rope.beta_slow = 1;
  return c;
}

void expect_relative(double got, double want) { EXPECT_NEAR(got, want, 3e-7 * std::fabs(want)); }

TEST(Rope, FrequenciesOfR1) {
  const std::vector<float> f = rope_frequencies(ModelConfig{}.rope, 64);
  ASSERT_EQ(f.size(), 32u);
  for (const auto& [i, want] : {std::pair{0, 1.0},
                                {1, 7.498942093e-1},
                                {10, 5.623413252e-2},
                                {11, 3.900692657e-2},
                                {12, 2.687936011e-2},
                                {15, 8.334508951e-3},
                                {16, 5.5e-3},
                                {17, 3.561997494e-3},
                                {22, 1.778279410e-4},
                                {23, 3.333803580e-5},
                                {31, 3.333803580e-6}})
    expect_relative(f[i], want);
}

TEST(Rope, FrequenciesOfKimiK2AreAStep) {
  const std::vector<float> f = rope_frequencies(kimi_k2().rope, 64);
  for (const auto& [i, want] : {std::pair{1, 7.131110849e-1},
                                {19, 1.621759908e-3},
                                {20, 3.614046774e-5},
                                {31, 8.764412912e-7}})
    expect_relative(f[i], want);
}

// The ramp begins at pair 0 at the earliest and ends at the number of dimensions, less one, at the
// latest (yarn_find_correction_range() of modeling_deepseek.py).
TEST(Rope, TheRampHasBounds) {
  const auto expect_frequencies = [](const RopeConfig& rope, const std::vector<double>& wanted) {
    const std::vector<float> f = rope_frequencies(rope, 16);
    ASSERT_EQ(f.size(), wanted.size());
    for (size_t i = 0; i < f.size(); ++i) expect_relative(f[i], wanted[i]);
  };
  RopeConfig rope = {.theta = 10, .factor = 4, .original_context = 100};  // from -2.4 to 9.6
  expect_frequencies(rope, {1, 6.936521436e-1, 4.779901264e-1, 3.268147902e-1, 2.213594362e-1,
                            1.482108566e-1, 9.780536755e-2, 6.334226803e-2});
  rope.beta_slow = 0.01;
  rope.original_context = 1000;  // from 5.6 to 33.6
  expect_frequencies(rope, {1, 7.498942093e-1, 5.623413252e-1, 4.216965034e-1, 3.162277660e-1,
                            2.371373706e-1, 1.644908454e-1, 1.133493217e-1});
}

TEST(Rope, WithoutYarn) {
  ModelConfig c;
  c.rope = {.theta = 50000, .yarn = false, .factor = 1};
  expect_relative(rope_frequencies(c.rope, 64)[31], 2.804612132e-5);
  expect_relative(softmax_scale(c), 0.07216878364870322);
  EXPECT_EQ(rope_amplitude(c.rope), 1);
}

TEST(Rope, SoftmaxScales) {
  ModelConfig r1;
  expect_relative(softmax_scale(r1), 0.1352337788608801);
  ModelConfig v2;
  v2.rope.mscale = v2.rope.mscale_all_dim = 0.707;
  expect_relative(softmax_scale(v2), 0.1147213867929261);
  EXPECT_EQ(rope_amplitude(v2.rope), 1);
  expect_relative(softmax_scale(kimi_k2()), 0.13086079996295005);
  ModelConfig no_all_dim;
  no_all_dim.rope.mscale_all_dim = 0;
  expect_relative(softmax_scale(no_all_dim), 0.07216878364870322);
  expect_relative(rope_amplitude(no_all_dim.rope), 1.3688879454113936);
}

TEST(Rope, RotatesAdjacentPairs) {
  const ModelConfig config;
  const std::vector<float> f = rope_frequencies(config.rope, 64);
  std::vector<float> x(2 * 64);  // two heads of one token
  for (int i = 0; i < 128; ++i) x[i] = static_cast<float>(i % 64 + 1);
  Team team(1);
  const cpu::KernelTable kernels = cpu::kernels_for(cpu::Isa::kReference);
  ModelConfig small;
  small.dim = small.dense_dim = small.expert_dim = 8;
  CpuOps ops(kernels, small, 1, team);
  const int32_t position = 5;
  ops.rope({x.data(), 2, 64, 64, DType::kF32}, {&position, 1}, {f, 1.f});
  for (int head = 0; head < 2; ++head) {
    const std::span<const float> y(x.data() + 64 * head, 64);
    expect_close(y.subspan(0, 4),
                 std::vector{2.201510735, -0.391599904, -0.178075911, -4.996827891}, 2e-6);
    expect_close(y.subspan(20, 4),
                 std::vector{14.0707848, 26.963178876, 17.912729769, 28.002394759}, 5e-6);
    expect_close(y.subspan(62, 2), std::vector{62.998933174, 64.001050139}, 1e-5);
    double sum = 0;
    for (const float v : y) sum += double{v} * v;
    EXPECT_NEAR(sum, 89440, 0.02);
  }
}

}  // namespace
}  // namespace tandem
