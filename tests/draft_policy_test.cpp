// How many tokens are drafted, on simulated machines whose step times are known.
#include "scheduling/drafts/draft_policy.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace tandem {
namespace {

// A machine and a model: seconds of a step, and how often drafts are accepted.
struct StepTimes {
  double plain = 1, per_draft = 0.1, to_draft = 0.05;  // to_draft: for each token of the longest
  double acceptance = 0.85;
  double noise = 0;
};

struct Result {
  double tokens_per_second = 0;
  double drafts_per_step = 0;
  int n_followed = 0;  // steps that their source prepared
};

// Runs `n_steps` steps of n sequences. After a draft that is rejected, the others of its sequence
// are rejected too.
Result run(DraftPolicy& policy, const StepTimes& machine, int n, int n_steps, int seed = 7) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> uniform(0, 1);
  std::vector<Acceptance> acceptances(n);
  std::vector<const Acceptance*> pointers;
  for (const Acceptance& a : acceptances) pointers.push_back(&a);
  std::vector<int> drafts(n);
  double seconds = 0, tokens = 0, all_drafts = 0, to_draft = 0;
  Result result;
  for (int step = 0; step < n_steps; ++step) {
    int n_drafts = 0, longest = 0;
    for (const int d : drafts) n_drafts += d, longest = std::max(longest, d);
    const double factor = 1 + machine.noise * (uniform(random) - 0.5);
    const double step_seconds = (machine.plain + machine.per_draft * n_drafts) * factor;
    for (int i = 0; i < n; ++i) {
      int n_accepted = 0;
      while (n_accepted < drafts[i] && uniform(random) < machine.acceptance) ++n_accepted;
      tokens += 1 + n_accepted;
      if (drafts[i] == 0) continue;
      acceptances[i].add(n_accepted, n_accepted < drafts[i]);
      policy.compared(n_accepted, n_accepted < drafts[i]);
    }
    seconds += step_seconds + to_draft;
    all_drafts += n_drafts;
    policy.measured({n, n_drafts, longest, step_seconds, to_draft});
    policy.choose(pointers, drafts);
    result.n_followed += policy.follows();
    longest = *std::max_element(drafts.begin(), drafts.end());
    to_draft = policy.follows() ? machine.to_draft * std::max(1, longest) : 0;
  }
  result.tokens_per_second = tokens / seconds;
  result.drafts_per_step = all_drafts / n_steps / n;
  return result;
}

// The mean of several runs: a probe of few drafts may be lucky or not.
Result run(const StepTimes& machine, int n = 1) {
  constexpr int kRuns = 4;
  Result mean;
  for (int seed = 0; seed < kRuns; ++seed) {
    DraftPolicy policy(4);
    const Result r = run(policy, machine, n, 8000, seed);
    mean.tokens_per_second += r.tokens_per_second / kRuns;
    mean.drafts_per_step += r.drafts_per_step / kRuns;
    mean.n_followed += r.n_followed / kRuns;
  }
  return mean;
}

// Tokens per second with always k drafts.
double fixed(const StepTimes& m, int k, int n) {
  double tokens = 1, chance = 1;
  for (int i = 0; i < k; ++i) tokens += chance *= m.acceptance;
  return n * tokens / (m.plain + m.per_draft * k * n + m.to_draft * k);
}

double best_fixed(const StepTimes& m, int n) {
  double best = n / m.plain;
  for (int k = 1; k <= 4; ++k) best = std::max(best, fixed(m, k, n));
  return best;
}

TEST(DraftPolicy, IsNearTheBestNumberAndNeverMuchBelowNone) {
  for (const double per_draft : {0.02, 0.2, 0.5, 0.9, 1.5})
    for (const double acceptance : {0.0, 0.3, 0.5, 0.85, 1.0})
      for (const double to_draft : {0.0, 0.05, 0.3})
        for (const int n : {1, 5}) {
          const StepTimes machine = {.plain = 1.0 * n,
                                     .per_draft = per_draft,
                                     .to_draft = to_draft * n,
                                     .acceptance = acceptance,
                                     .noise = 0.1};
          const Result r = run(machine, n);
          SCOPED_TRACE(testing::Message() << per_draft << " " << acceptance << " " << to_draft
                                          << " " << n << ": " << r.drafts_per_step);
          EXPECT_GT(r.tokens_per_second, 0.97 * n / machine.plain);
          EXPECT_GT(r.tokens_per_second, 0.9 * best_fixed(machine, n));
        }
}

TEST(DraftPolicy, NothingIsDraftedOrPreparedWhereItDoesNotPay) {
  const Result r = run({.per_draft = 0.9, .acceptance = 0.5});
  EXPECT_LT(r.drafts_per_step, 0.02);
  EXPECT_LT(r.n_followed, 8000 / 16);
}

TEST(DraftPolicy, ManyDraftsWhereTheyAreCheapAndRight) {
  EXPECT_GT(run({.per_draft = 0.02, .to_draft = 0.02, .acceptance = 1}).drafts_per_step, 3.5);
}

TEST(DraftPolicy, ComesBackWhenItPaysAgain) {
  DraftPolicy policy(4);
  EXPECT_LT(run(policy, {.per_draft = 1.5, .acceptance = 0.8}, 2, 3000).drafts_per_step, 0.1);
  run(policy, {.per_draft = 0.05, .acceptance = 0.8}, 2, 12000);
  EXPECT_GT(run(policy, {.per_draft = 0.05, .acceptance = 0.8}, 2, 1000).drafts_per_step, 1.0);
}

// A sequence whose drafts are rejected gets none, while another one beside it gets some.
TEST(DraftPolicy, EachSequenceByItsOwnAcceptance) {
  DraftPolicy policy(4);
  Acceptance good, bad;
  for (int i = 0; i < 60; ++i) {
    good.add(1, false);
    bad.add(0, true);
    policy.compared(1, false);
    policy.compared(0, true);
  }
  const Acceptance* const both[] = {&bad, &good};
  int drafts[2];
  for (int i = 0; i < 30; ++i) {
    policy.choose(both, drafts);
    const int n = drafts[0] + drafts[1];
    policy.measured({2, n, std::max(drafts[0], drafts[1]), 1 + 0.2 * n, 0.01});
  }
  policy.choose(both, drafts);
  EXPECT_EQ(drafts[0], 0);
  EXPECT_GT(drafts[1], 0);
  EXPECT_NEAR(good.rate(0, 0.5), 1, 0.1);
  EXPECT_NEAR(bad.rate(0, 0.5), 0, 0.1);
}

TEST(Acceptance, OfEachDraftAfterTheOneBefore) {
  Acceptance a;
  EXPECT_EQ(a.rate(0, 0.7), 0.7);
  EXPECT_EQ(a.rates(0.7)[3], 0.7);
  for (int i = 0; i < 300; ++i) {
    a.add(1, true);
    a.add(1, false);
  }
  const Acceptance::Rates rates = a.rates(0.5);
  EXPECT_GT(rates[0], 0.95);
  EXPECT_LT(rates[1], 0.1);
  EXPECT_EQ(rates[2], rates[1]) << "was never tried";
}

TEST(Acceptance, OldDraftsCountLess) {
  Acceptance a;
  for (int i = 0; i < 1000; ++i) a.add(0, true);
  for (int i = 0; i < 300; ++i) a.add(1, false);
  EXPECT_GT(a.rate(0, 0.5), 0.9);
}

// The first draft is nearly always right and the second never, as where one layer for multi-token
// prediction is applied twice.
TEST(DraftPolicy, DraftsThatAreNeverAcceptedAfterOthersAreLeftOut) {
  DraftPolicy policy(4);
  Acceptance one;
  const Acceptance* const only[] = {&one};
  int drafts[1] = {0}, n_late = 0, n_all = 0;
  for (int i = 0; i < 400; ++i) {
    const int n = drafts[0];
    policy.measured({1, n, n, 1 + 0.05 * n, 0.02 * n});
    if (n > 0) {
      one.add(1, n > 1);
      policy.compared(1, n > 1);
    }
    policy.choose(only, drafts);
    if (i < 100) continue;
    n_late += drafts[0] > 1;
    n_all += drafts[0] > 0;
  }
  EXPECT_GT(n_all, 250);
  EXPECT_LT(n_late, 30);
}

}  // namespace
}  // namespace tandem
