// How steps are divided into micro-batches: the division itself, and in how many, on simulated
// ranks whose times are known.
#include "model/micro_batches.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>

#include "engine/micro_batch_policy.h"

namespace tandem::test {
namespace {

// A step of sequences with so many tokens, each of which has 7 tokens before them.
struct DividedStep {
  explicit DividedStep(const std::vector<int>& n_tokens) {
    for (const int n : n_tokens) {
      const auto first = static_cast<int32_t>(tokens.size());
      sequences.push_back({first, n, 7 + n, {}});
      for (int i = 0; i < n; ++i) {
        tokens.push_back(first + i);
        positions.push_back(7 + i);
      }
    }
  }
  Batch batch() const { return {tokens, positions, sequences, logit_rows}; }
  std::vector<int32_t> tokens, positions, logit_rows = {0};
  std::vector<Sequence> sequences;
};

std::vector<int> cuts_of(const std::vector<int>& n_tokens, int n) {
  const DividedStep step(n_tokens);
  const MicroBatchCuts cuts = micro_batch_cuts(step.batch(), n);
  return {cuts.begin(), cuts.begin() + n + 1};
}

using Cuts = std::vector<int>;

TEST(MicroBatches, DecodeStepsAreDividedBetweenSequences) {
  EXPECT_EQ(cuts_of({1, 1, 1, 1}, 2), (Cuts{0, 2, 4}));
  EXPECT_EQ(cuts_of({1, 1, 1}, 2), (Cuts{0, 2, 3}));
  EXPECT_EQ(cuts_of({2, 2, 2}, 2), (Cuts{0, 4, 6}));
  EXPECT_EQ(cuts_of({9, 9, 9}, 2), (Cuts{0, 18, 27}));
  EXPECT_EQ(cuts_of({1, 1, 1, 1, 1}, 4), (Cuts{0, 2, 3, 4, 5}));
  EXPECT_EQ(cuts_of({1}, 2), (Cuts{0, 1, 1}));
  EXPECT_EQ(cuts_of({9}, 3), (Cuts{0, 9, 9, 9}));
  EXPECT_EQ(cuts_of({}, 2), (Cuts{0, 0, 0}));
  EXPECT_EQ(cuts_of({5}, 1), (Cuts{0, 5}));
}

TEST(MicroBatches, PromptsAreCut) {
  EXPECT_EQ(cuts_of({100}, 2), (Cuts{0, 50, 100}));
  EXPECT_EQ(cuts_of({100}, 4), (Cuts{0, 25, 50, 75, 100}));
  EXPECT_EQ(cuts_of({10, 1}, 2), (Cuts{0, 6, 11}));
  EXPECT_EQ(cuts_of({1, 1, 40}, 2), (Cuts{0, 21, 42}));
  EXPECT_EQ(cuts_of({38, 4}, 3), (Cuts{0, 14, 28, 42}));
}

// Every token is in one micro-batch, with all tokens before it in the cache, and no micro-batch is
// larger than what its lane takes.
TEST(MicroBatches, HaveAllTokensOnce) {
  std::mt19937 random(3);
  MicroBatchDivider divider(600);
  for (int round = 0; round < 3000; ++round) {
    std::vector<int> n_tokens;
    int left = static_cast<int>(random() % 600);
    while (left > 0) {
      const int most = random() % 3 == 0 ? left : std::min(left, 12);
      n_tokens.push_back(1 + static_cast<int>(random() % unsigned(most)));
      left -= n_tokens.back();
    }
    const DividedStep step(n_tokens);
    const int n = 1 + static_cast<int>(random() % kMaxMicroBatches);
    const MicroBatches parts = divider.divide(step.batch(), n);
    ASSERT_EQ(parts.n, n);
    ASSERT_EQ(parts.n_tokens(), step.batch().n());
    std::vector<int> n_computed(n_tokens.size(), 0);  // tokens of each sequence so far
    int next = 0;
    for (int i = 0; i < n; ++i) {
      const Batch& part = parts.at[i];
      ASSERT_EQ(part.micro_batch, i);
      ASSERT_LE(part.n(), most_tokens_of(i, step.batch().n()));
      int n_of_part = 0;
      for (const Sequence& s : part.sequences) {
        ASSERT_EQ(s.first_token, next);
        const int sequence = static_cast<int>(
            std::find_if(step.sequences.begin(), step.sequences.end(),
                         [&](const Sequence& of) { return next < of.first_token + of.n_tokens; }) -
            step.sequences.begin());
        n_computed[sequence] += s.n_tokens;
        ASSERT_EQ(s.kv_length, 7 + n_computed[sequence]);
        next += s.n_tokens;
        n_of_part += s.n_tokens;
      }
      ASSERT_EQ(part.n(), n_of_part);
      for (int t = 0; t < part.n(); ++t) {
        ASSERT_EQ(part.tokens[t], part.first_row() + t);
        ASSERT_EQ(part.positions[t], step.positions[part.first_row() + t]);
      }
    }
    ASSERT_EQ(n_computed, n_tokens);
  }
}

// Ranks whose steps have so many layers of one second. Each exchange takes `hop`, in which other
// micro-batches are computed; reading weights takes `fixed` of the second for any number of tokens.
struct SimulatedRanks {
  double hop, fixed = 0;
  double noise = 0;
  double computed(int n) const { return n * fixed + 1 - fixed; }
  double seconds(int n) const {
    return std::max(computed(n), computed(n) / n + 2 * hop) + 0.03 * (n - 1);
  }
};

// The share of the last half of n_steps in which each choice was made.
std::array<double, kMaxMicroBatches + 1> shares(MicroBatchPolicy& policy, SimulatedRanks ranks,
                                                MicroBatchPolicy::Step step, int n_steps = 400) {
  std::array<double, kMaxMicroBatches + 1> share = {};
  std::mt19937 random(5);
  std::uniform_real_distribution<double> uniform(-0.5, 0.5);
  for (int i = 0; i < n_steps; ++i) {
    const int n = policy.choose(step);
    const double seconds = ranks.seconds(n) * (1 + ranks.noise * uniform(random));
    policy.measured(step, n, i == 0 ? 50 : seconds, n == 1 ? 2 * ranks.hop : 0);
    if (i >= n_steps / 2) share[n] += 2.0 / n_steps;
  }
  return share;
}

constexpr MicroBatchPolicy::Step kDecode{16, true, 4}, kPrompt{512, false, 4};

TEST(MicroBatchPolicy, OverlapsWhereRowsTravelLong) {
  for (const auto& step : {kDecode, kPrompt}) {
    MicroBatchPolicy policy;
    // Two of them hide a hop of 1/4, four hide one of 3/8.
    EXPECT_GT(shares(policy, {.hop = 0.24, .noise = 0.03}, step)[2], 0.9);
    MicroBatchPolicy of_slower;
    EXPECT_GT(shares(of_slower, {.hop = 0.37, .noise = 0.03}, step)[4], 0.9);
  }
}

// What cannot gain is not tried.
TEST(MicroBatchPolicy, NeverDividesWhereRowsArriveAtOnce) {
  MicroBatchPolicy policy;
  EXPECT_DOUBLE_EQ(shares(policy, {.hop = 0.01, .noise = 0.05}, kDecode)[1], 1);
}

// Where each micro-batch reads all weights, dividing costs more than it hides. Trials are few.
TEST(MicroBatchPolicy, SeesWhatDividingCosts) {
  MicroBatchPolicy policy;
  const auto share = shares(policy, {.hop = 0.2, .fixed = 0.9}, kDecode, 2000);
  EXPECT_GT(share[1], 0.95);
  EXPECT_GT(share[2], 0) << "a trial now and then";
}

TEST(MicroBatchPolicy, FollowsANetworkThatChanges) {
  MicroBatchPolicy policy;
  EXPECT_GT(shares(policy, {.hop = 0.01}, kPrompt)[1], 0.99);
  EXPECT_GT(shares(policy, {.hop = 0.24}, kPrompt, 1500)[2], 0.9);
  EXPECT_GT(shares(policy, {.hop = 0.01, .fixed = 0.3}, kPrompt, 3000)[1], 0.9);
}

TEST(MicroBatchPolicy, SizesAndKindsAreApart) {
  MicroBatchPolicy policy;
  EXPECT_GT(shares(policy, {.hop = 0.24}, kDecode)[2], 0.9);
  for (const auto& other :
       {kPrompt, MicroBatchPolicy::Step{17 * 4, true, 4}, MicroBatchPolicy::Step{16, false, 4}})
    EXPECT_EQ(policy.choose(other), 1);
}

// A step that cannot fill them is not divided.
TEST(MicroBatchPolicy, DividesNoMoreThanThereIs) {
  MicroBatchPolicy policy;
  EXPECT_GT(shares(policy, {.hop = 0.37}, {3, true, 3})[2], 0.9);
  MicroBatchPolicy of_one;
  EXPECT_DOUBLE_EQ(shares(of_one, {.hop = 0.37}, {1, true, 1})[1], 1);
}

}  // namespace
}  // namespace tandem::test
