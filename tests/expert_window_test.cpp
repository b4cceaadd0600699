// The window of steps whose uses of experts are counted, against a list of all steps.
#include "scheduling/expert_window.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "tests/small_config.h"

namespace tandem::test {
namespace {

constexpr int kLayers = 3, kExperts = 4;
using Counts = std::vector<uint32_t>;

// A model whose counters are added to, and all of its steps.
struct Steps {
  Counts counters = Counts(kLayers * kExperts);
  std::vector<int> tokens;
  std::vector<Counts> of_step;

  // A step of n tokens that all choose experts `first` and `first` + 1 of layer 1, and the others
  // of layer 2.
  void add(int n, int first) {
    tokens.push_back(n);
    Counts& step = of_step.emplace_back(kLayers * kExperts);
    for (int k = 0; k < 2; ++k) {
      step[kExperts + (first + k) % kExperts] += n;
      step[2 * kExperts + (first + 2 + k) % kExperts] += n;
    }
    for (size_t i = 0; i < step.size(); ++i) counters[i] += step[i];
  }
  // What the last n_steps of the first `end` steps counted.
  ExpertUses last(int64_t n_steps, int64_t end) const {
    ExpertUses uses{.n_steps = n_steps, .n_tokens = 0};
    uses.of_layer = {{}, std::vector<int64_t>(kExperts), std::vector<int64_t>(kExperts)};
    for (int64_t s = end - n_steps; s < end; ++s) {
      uses.n_tokens += tokens[s];
      for (int layer = 1; layer < kLayers; ++layer)
        for (int e = 0; e < kExperts; ++e)
          uses.of_layer[layer][e] += of_step[s][layer * kExperts + e];
    }
    return uses;
  }
};

void expect_same(const ExpertUses& got, const ExpertUses& want) {
  EXPECT_EQ(got.n_steps, want.n_steps);
  EXPECT_EQ(got.n_tokens, want.n_tokens);
  EXPECT_EQ(got.of_layer, want.of_layer);
}

TEST(ExpertWindow, BeginsEmptyWithWhatWasCountedBefore) {
  const ModelConfig config = config_of_four_experts(3);
  Steps before;
  before.add(9, 0);
  ExpertWindow window(config, 16, before.counters);
  EXPECT_FALSE(window.has_news());
  EXPECT_FALSE(window.is_due());
  expect_same(window.uses(), Steps().last(0, 0));
  window.read(before.counters);  // changes nothing
  expect_same(window.uses(), Steps().last(0, 0));
}

// Blocks of 2 steps: a read is due at their ends, and the window then has the last 16 steps.
TEST(ExpertWindow, MovesOnByAnEighth) {
  const ModelConfig config = config_of_four_experts(3);
  Steps steps;
  ExpertWindow window(config, 16, steps.counters);
  for (int n = 1; n <= 70; ++n) {
    steps.add(n, n / 5);
    window.add_step(n);
    EXPECT_TRUE(window.has_news());
    ASSERT_EQ(window.is_due(), n % 2 == 0) << n;
    if (!window.is_due()) continue;
    window.read(steps.counters);
    EXPECT_FALSE(window.has_news());
    EXPECT_FALSE(window.is_due());
    expect_same(window.uses(), steps.last(std::min(n, 16), n));
  }
}

// Reads within a block bring the newest steps, and the window never has more than its length.
TEST(ExpertWindow, MayBeReadAtAnyStep) {
  const ModelConfig config = config_of_four_experts(3);
  std::mt19937 random(5);
  for (const int length : {1, 2, 7, 8, 15, 16, 17, 100}) {
    SCOPED_TRACE(length);
    const int block = std::max(length / 8, 1);
    Steps steps;
    ExpertWindow window(config, length, steps.counters);
    int n_read = 0;
    for (int n = 1; n <= 400; ++n) {
      steps.add(static_cast<int>(random() % 5), static_cast<int>(random() % 4));
      window.add_step(steps.tokens.back());
      if (!window.is_due() && random() % 4 != 0) continue;
      window.read(steps.counters);
      ++n_read;
      const ExpertUses uses = window.uses();
      EXPECT_LE(uses.n_steps, length);
      EXPECT_GE(uses.n_steps, std::min(n, length - block + 1));
      expect_same(uses, steps.last(uses.n_steps, n));
    }
    EXPECT_GE(n_read, 400 / block / 2);
  }
}

TEST(ExpertWindow, CountersMayPassTheirLargestNumber) {
  const ModelConfig config = config_of_four_experts(3);
  Steps steps;
  std::fill(steps.counters.begin(), steps.counters.end(), ~0u - 5);
  ExpertWindow window(config, 8, steps.counters);
  for (int n = 1; n <= 20; ++n) {
    steps.add(4, n);
    window.add_step(4);
    window.read(steps.counters);
    expect_same(window.uses(), steps.last(std::min(n, 8), n));
  }
}

// As for a pipeline stage or a replica without tokens: a layer's counts stay 0.
TEST(ExpertWindow, StepsWithoutRowsCountAsSteps) {
  const ModelConfig config = config_of_four_experts(3);
  Steps steps;
  ExpertWindow window(config, 8, steps.counters);
  window.add_step(3);
  window.read(steps.counters);
  const ExpertUses uses = window.uses();
  EXPECT_EQ(uses.n_steps, 1);
  EXPECT_EQ(uses.n_tokens, 3);
  EXPECT_EQ(uses.of_layer[2], std::vector<int64_t>(kExperts));
  EXPECT_TRUE(uses.of_layer[0].empty()) << "a dense layer";
}

}  // namespace
}  // namespace tandem::test
