// In how many micro-batches steps are made, on simulated ranks whose times are known: what trials
// cost, what noise does, and how soon a change is noticed.
#include "engine/micro_batch_policy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <random>

namespace tandem::test {
namespace {

// Ranks whose steps have so many layers of one second. Each exchange takes `hop`, in which other
// micro-batches are computed; reading weights takes `fixed` of the second for any number of tokens.
struct SimulatedRanks {
  double hop, fixed = 0;
  double computed(int n) const { return n * fixed + 1 - fixed; }
  double seconds(int n) const {
    return std::max(computed(n), computed(n) / n + 2 * hop) + 0.03 * (n - 1);
  }
  double least() const { return std::min({seconds(1), seconds(2), seconds(4)}); }
  int fastest() const { return seconds(1) == least() ? 1 : seconds(2) == least() ? 2 : 4; }
};

constexpr MicroBatchPolicy::Step kDecode{16, true, 4}, kPrompt{512, false, 4};

// What makes a step's time differ from what it should be: a factor.
using Disturbance = std::function<double(int step)>;

// Normally distributed, and now and then so many times as long.
Disturbance noise(unsigned seed, double deviation, double often = 0, double outlier = 1) {
  return [random = std::mt19937(seed), deviation, often, outlier](int) mutable {
    std::normal_distribution<double> normal;
    std::uniform_real_distribution<double> uniform;
    const double usual = std::exp(deviation * normal(random));
    return uniform(random) < often ? outlier * usual : usual;
  };
}

struct Course {
  std::vector<int> choices;
  double seconds = 0, least_seconds = 0;  // of the fastest choice with the same disturbances
  double over_least() const { return seconds / least_seconds; }
  // The share of the last half of the steps that were made in n micro-batches.
  double share(int n) const {
    const auto half = choices.begin() + std::ssize(choices) / 2;
    return static_cast<double>(std::count(half, choices.end(), n)) /
           static_cast<double>(choices.end() - half);
  }
  std::vector<int> steps_in(int n) const {
    std::vector<int> steps;
    for (int i = 0; i < std::ssize(choices); ++i)
      if (choices[i] == n) steps.push_back(i);
    return steps;
  }
  // Steps before the first of ten successive ones in n.
  int steps_until(int n) const {
    const std::vector<int> ten(10, n);
    return static_cast<int>(std::search(choices.begin(), choices.end(), ten.begin(), ten.end()) -
                            choices.begin());
  }
};

Course run(
    MicroBatchPolicy& policy, const SimulatedRanks& ranks, MicroBatchPolicy::Step step, int n_steps,
    const Disturbance& disturbance = [](int) { return 1; }) {
  Course course;
  for (int i = 0; i < n_steps; ++i) {
    const int n = policy.choose(step);
    const double factor = disturbance(i);
    policy.measured(step, n, step.n_tokens * factor * ranks.seconds(n),
                    step.n_tokens * factor * (n == 1 ? 2 * ranks.hop : 0));
    course.choices.push_back(n);
    course.seconds += factor * ranks.seconds(n);
    course.least_seconds += factor * ranks.least();
  }
  return course;
}

Course run(
    const SimulatedRanks& ranks, int n_steps,
    const Disturbance& disturbance = [](int) { return 1; }) {
  MicroBatchPolicy policy;
  return run(policy, ranks, kDecode, n_steps, disturbance);
}

// Whole steps are the fastest, of two, and of four: by far and by little.
constexpr SimulatedRanks kSome[] = {{0.2, 0.9}, {0.2, 0.39},  {0.2, 0.3},
                                    {0.24},     {0.15, 0.05}, {0.37, 0.01}};

TEST(MicroBatchPolicy, CostsLittleMoreThanTheFastestChoice) {
  for (const SimulatedRanks& ranks : kSome) {
    SCOPED_TRACE(testing::Message() << ranks.hop << " " << ranks.fixed);
    EXPECT_LT(run(ranks, 500).over_least(), 1.02);
    EXPECT_LT(run(ranks, 5000).over_least(), 1.005);
    for (unsigned seed = 0; seed < 20; ++seed)
      EXPECT_LT(run(ranks, 500, noise(seed, 0.04, 0.01, 3)).over_least(), 1.03) << seed;
  }
}

// Steps twice as long as the median are rare, but all of them may be noisy.
TEST(MicroBatchPolicy, NoiseMakesNoSlowChoiceFast) {
  double over_least = 0;
  constexpr int kRuns = 40;
  for (unsigned seed = 0; seed < kRuns; ++seed)
    over_least += run({0.2, 0.9}, 500, noise(seed, 0.15, 0.02, 3)).over_least() / kRuns;
  EXPECT_LT(over_least, 1.02);
}

// The first step that counts in two micro-batches is much too short.
TEST(MicroBatchPolicy, OneFastStepDecidesNothing) {
  const Course once = run({0.2, 0.9}, 40, [](int i) { return i == 5 ? 0.5 : 1; });
  EXPECT_EQ(once.steps_in(2), (std::vector{4, 5, 7, 9}));
}

// A host that is half as fast for a while makes every choice slow. What was measured before says
// nothing then.
TEST(MicroBatchPolicy, ComparesWithStepsOfTheSameTime) {
  for (const SimulatedRanks& ranks : {SimulatedRanks{0.2, 0.5}, SimulatedRanks{0.24}}) {
    const Course changing = run(ranks, 1000, [](int i) { return i / 25 % 2 == 0 ? 1 : 2; });
    EXPECT_LT(changing.over_least(), 1.025) << ranks.fastest();
  }
}

// As often as the time of whole steps changes, trials are paid by the steps after them.
TEST(MicroBatchPolicy, TrialsCostTwoPercentAtMost) {
  const SimulatedRanks ranks{0.2, 0.9};
  const Course changing = run(ranks, 2000, [](int i) { return i / 10 % 2 == 0 ? 1 : 1.5; });
  EXPECT_GT(changing.steps_in(2).size(), 40u) << "trials";
  EXPECT_LT(changing.over_least(), 1.025);
}

// Two steps of a choice that is much slower are enough, besides the one that touches memory, and
// one step when that is known already. What is slower still is not tried.
TEST(MicroBatchPolicy, LeavesWhatIsMuchSlowerAtOnce) {
  const Course slower = run({0.2, 0.9}, 100);
  EXPECT_EQ(slower.steps_in(2), (std::vector{4, 5, 7, 46, 80}));
  EXPECT_TRUE(slower.steps_in(4).empty());
}

// The second trial comes when the first is paid, later ones after twice as many steps each time.
TEST(MicroBatchPolicy, TriesLessAndLessOften) {
  const std::vector<int> trials = run({0.2, 0.9}, 2000).steps_in(2);
  std::vector<int> gaps(trials.size());
  std::adjacent_difference(trials.begin(), trials.end(), gaps.begin());
  gaps.erase(gaps.begin(), gaps.begin() + 3);
  EXPECT_EQ(gaps, (std::vector{39, 34, 66, 130, 258, 258, 258, 258, 258, 258}));
}

TEST(MicroBatchPolicy, StepsOfATrialAlternateWithOthers) {
  const Course equal = run({0.2, 0.33}, 200);
  const std::vector<int> trials = equal.steps_in(2);
  ASSERT_GE(trials.size(), 10u);
  for (size_t i = 2; i < trials.size(); ++i) EXPECT_GE(trials[i] - trials[i - 1], 2);
}

TEST(MicroBatchPolicy, OverlapsWhereRowsTravelLong) {
  for (const auto& step : {kDecode, kPrompt}) {
    // Two of them hide a hop of 1/4, four hide one of 3/8.
    MicroBatchPolicy policy, of_slower;
    EXPECT_GT(run(policy, {0.24}, step, 400, noise(1, 0.01)).share(2), 0.95);
    EXPECT_GT(run(of_slower, {0.37}, step, 400, noise(1, 0.01)).share(4), 0.95);
  }
}

// What cannot gain is not tried: where rows arrive at once, and where two already hide the waiting.
TEST(MicroBatchPolicy, NeverTriesWhatCannotGain) {
  EXPECT_EQ(run({0.01}, 400, noise(1, 0.01)).steps_in(1).size(), 400u);
  EXPECT_TRUE(run({0.24}, 2000, noise(1, 0.01)).steps_in(4).empty());
}

// A GPU does not say how long it waited.
TEST(MicroBatchPolicy, TriesWhereWaitingIsNotKnown) {
  MicroBatchPolicy policy;
  int n_divided = 0;
  for (int i = 0; i < 10; ++i) {
    const int n = policy.choose(kDecode);
    n_divided += n > 1;
    policy.measured(kDecode, n, n, {});
  }
  EXPECT_GT(n_divided, 0);
}

TEST(MicroBatchPolicy, FollowsANetworkThatChanges) {
  const SimulatedRanks near{0.01, 0.1}, far{0.24, 0.02}, farther{0.4, 0.02};
  ASSERT_EQ(near.fastest(), 1);
  ASSERT_EQ(far.fastest(), 2);
  ASSERT_EQ(farther.fastest(), 4);
  MicroBatchPolicy policy;
  EXPECT_GT(run(policy, near, kPrompt, 1000, noise(1, 0.03)).share(1), 0.99);
  EXPECT_LT(run(policy, far, kPrompt, 1000, noise(2, 0.03)).steps_until(2), 20);
  EXPECT_LT(run(policy, farther, kPrompt, 1000, noise(3, 0.03)).steps_until(4), 40);
  // Both steps back take about as long as before: the next regular trials find out.
  EXPECT_LT(run(policy, near, kPrompt, 1000, noise(4, 0.03)).steps_until(1), 300);
}

TEST(MicroBatchPolicy, SizesAndKindsAreApart) {
  MicroBatchPolicy policy;
  EXPECT_GT(run(policy, {0.24}, kDecode, 400).share(2), 0.9);
  for (const auto& other :
       {kPrompt, MicroBatchPolicy::Step{17 * 4, true, 4}, MicroBatchPolicy::Step{16, false, 4}})
    EXPECT_EQ(policy.choose(other), 1);
}

// A size begins with what is known of the one beside it, and learns by itself that it is wrong.
TEST(MicroBatchPolicy, NeighbouringSizesShareWhatIsKnown) {
  MicroBatchPolicy policy;
  run(policy, {0.24}, kDecode, 400);
  for (const int n_tokens : {8, 32}) EXPECT_EQ(policy.choose({n_tokens, true, 4}), 2) << n_tokens;
  const Course own = run(policy, {0.2, 0.9}, {33, true, 4}, 400);
  EXPECT_EQ(own.choices[0], 2);
  EXPECT_LT(own.steps_until(1), 300);
  EXPECT_EQ(policy.choose(kDecode), 2);
}

// A step that cannot fill them is not divided.
TEST(MicroBatchPolicy, DividesNoMoreThanThereIs) {
  MicroBatchPolicy policy, of_one;
  EXPECT_GT(run(policy, {0.37}, {3, true, 3}, 400).share(2), 0.9);
  EXPECT_EQ(run(of_one, {0.37}, {1, true, 1}, 400).steps_in(1).size(), 400u);
  run(policy, {0.37}, {4, true, 4}, 400);
  EXPECT_EQ(policy.choose({4, true, 4}), 4);
  EXPECT_EQ(policy.choose({4, true, 2}), 2) << "as three tokens are";
}

TEST(RecentValues, MedianOfTheLastSeven) {
  RecentValues values;
  for (const double value : {100, 1}) values.add(value);
  EXPECT_EQ(values.median(), 1) << "the lower one of two";
  for (const double value : {2, 3, 4, 5, 6, 7}) values.add(value);
  EXPECT_EQ(values.n(), 7);
  EXPECT_EQ(values.median(), 4);
  EXPECT_EQ(values.median(3), 6) << "of the last three";
  values.clear();
  EXPECT_EQ(values.n(), 0);
}

}  // namespace
}  // namespace tandem::test
