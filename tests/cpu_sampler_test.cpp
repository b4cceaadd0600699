// Tokens drawn by the team of a CPU. What one draw does is tested in sampler_test.
#include "ops/cpu_sampler.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>

#include "scheduling/sampler.h"

namespace tandem::test {
namespace {

constexpr int kVocab = 150, kColumns = 160, kRows = 40;  // rows have more columns than tokens

struct Logits {
  std::vector<float> numbers = std::vector<float>(int64_t{kRows} * kColumns);
  TensorView view() { return {numbers.data(), kRows, kColumns, kColumns}; }
};

Logits random_logits() {
  Logits logits;
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 3);
  for (int row = 0; row < kRows; ++row)
    for (int t = 0; t < kColumns; ++t)
      logits.numbers[row * kColumns + t] =
          t < kVocab ? normal(random) : std::numeric_limits<float>::quiet_NaN();
  return logits;
}

SamplingParams params_of(int row) {
  SamplingParams p;
  p.temperature = row % 4 == 0 ? 0 : 0.5f * static_cast<float>(row % 4);
  p.top_p = row % 3 == 0 ? 1 : 0.7f;
  p.top_k = row % 5 == 0 ? 7 : 0;
  p.min_p = row % 7 == 0 ? 0.1f : 0;
  p.seed = row;
  return p;
}

TEST(CpuSampler, DrawsWhatASamplerOfTheSequenceDraws) {
  const Vocabulary vocabulary{.size = kVocab, .holes = {3, 64, 149}};
  Team team(2);
  CpuSampler sampler(allowed_bits(vocabulary), kVocab, team);
  std::vector<Draw> draws;
  std::vector<int32_t> want;
  Logits logits = random_logits();
  for (int row = kRows - 1; row >= 0; row -= 2) {
    Sampler of_sequence(params_of(row), vocabulary, {});
    draws.push_back(*of_sequence.next_draw(row));
    std::vector<float> copy(logits.view().row<float>(row), logits.view().row<float>(row) + kVocab);
    want.push_back(of_sequence.next(copy).token);
  }
  std::vector<int32_t> tokens(draws.size());
  sampler.draw(logits.view(), draws, tokens);
  EXPECT_EQ(tokens, want);
}

TEST(CpuSampler, HolesAreNeverDrawn) {
  const Vocabulary vocabulary{.size = kVocab, .holes = {3, 149}};
  Team team(1);
  CpuSampler sampler(allowed_bits(vocabulary), kVocab, team);
  Logits logits = random_logits();
  logits.numbers[3] = logits.numbers[149] = 100;
  logits.numbers[77] = 50;
  std::vector<int32_t> token(1);
  sampler.draw(logits.view(), std::vector<Draw>{{0, 0, 1, 0, 0, 0}}, token);
  EXPECT_EQ(token[0], 77);
  CpuSampler all(allowed_bits({.size = kVocab}), kVocab, team);
  for (const int32_t likeliest : {0, 3, kVocab - 1}) {
    logits.numbers[kColumns + likeliest] = static_cast<float>(200 + likeliest);
    all.draw(logits.view(), std::vector<Draw>{{1, 0, 1, 0, 0, 0}}, token);
    EXPECT_EQ(token[0], likeliest) << "every other token may be";
  }
}

TEST(CpuSampler, ARowThatIsNotFiniteHasNoToken) {
  Team team(2);
  CpuSampler sampler(allowed_bits({.size = kVocab}), kVocab, team);
  Logits logits = random_logits();
  logits.numbers[2 * kColumns + 9] = std::numeric_limits<float>::infinity();
  logits.numbers[4 * kColumns + kVocab - 1] = std::numeric_limits<float>::quiet_NaN();
  std::vector<int32_t> tokens(3);
  sampler.draw(logits.view(),
               std::vector<Draw>{{2, 1, 1, 0, 0, 0.5}, {3, 1, 1, 0, 0, 0.5}, {4, 0, 1, 0, 0, 0}},
               tokens);
  EXPECT_EQ(tokens[0], -1);
  EXPECT_GE(tokens[1], 0);
  EXPECT_EQ(tokens[2], -1);
}

}  // namespace
}  // namespace tandem::test
