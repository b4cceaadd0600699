// How steps are divided into micro-batches.
#include "model/micro_batches.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>

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

}  // namespace
}  // namespace tandem::test
