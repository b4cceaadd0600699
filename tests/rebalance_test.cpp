// New owners for the experts of a running model: ranks keep their numbers of experts, every expert
// has an owner in every wave, waves fit the room, and loads become as even as the best of two ways.
#include "offload/balance/rebalance.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <set>

namespace tandem::test {
namespace {

// Experts dealt to ranks, with some more replicas.
OwnersOfLayer random_owners(int n_experts, int n_ranks, int n_redundant, std::mt19937& random) {
  OwnersOfLayer owners(n_experts);
  std::vector<int> order(n_experts);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  for (int i = 0; i < n_experts; ++i) owners[order[i]] = {i % n_ranks};
  for (int i = 0; i < n_redundant; ++i) {
    std::vector<int>& ranks = owners[random() % n_experts];
    const int rank = static_cast<int>(random() % n_ranks);
    if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) ranks.push_back(rank);
  }
  for (std::vector<int>& ranks : owners) std::sort(ranks.begin(), ranks.end());
  return owners;
}

std::vector<double> zipf(int n, double skew, std::mt19937& random) {
  std::vector<double> use(n);
  for (int e = 0; e < n; ++e) use[e] = std::floor(1e6 * std::pow(e + 1.0, -skew));
  std::shuffle(use.begin(), use.end(), random);
  return use;
}

std::vector<int> numbers(const OwnersOfLayer& owners, int n_ranks) {
  std::vector<int> n(n_ranks);
  for (const auto& ranks : owners)
    for (const int rank : ranks) ++n.at(rank);
  return n;
}

int arrivals(const OwnersOfLayer& from, const OwnersOfLayer& to) {
  int n = 0;
  for (size_t e = 0; e < from.size(); ++e)
    for (const int rank : to[e])
      n += std::find(from[e].begin(), from[e].end(), rank) == from[e].end();
  return n;
}

void expect_sound(const OwnersOfLayer& now, const OwnersOfLayer& then, int n_ranks) {
  ASSERT_EQ(then.size(), now.size());
  for (const std::vector<int>& ranks : then) {
    EXPECT_FALSE(ranks.empty());
    EXPECT_TRUE(std::is_sorted(ranks.begin(), ranks.end(), std::less_equal<>())) << "no rank twice";
  }
  const std::vector<int> before = numbers(now, n_ranks), after = numbers(then, n_ranks);
  for (int r = 0; r < n_ranks; ++r) EXPECT_LE(after[r], before[r]) << "rank " << r;
}

TEST(Rebalance, KeepsNumbersAndNeverGetsLessEven) {
  std::mt19937 random(5);
  for (int round = 0; round < 300; ++round) {
    const int n_ranks = 2 + static_cast<int>(random() % 7);
    const int n_experts = n_ranks + static_cast<int>(random() % 60);
    const OwnersOfLayer now = random_owners(
        n_experts, n_ranks, round % 3 == 0 ? 0 : static_cast<int>(random() % 9), random);
    const std::vector<double> use = zipf(n_experts, 0.25 * (round % 6), random);
    const OwnersOfLayer then = rebalanced(now, use, {n_ranks});
    expect_sound(now, then, n_ranks);
    EXPECT_GE(balancedness(then, use, n_ranks), balancedness(now, use, n_ranks) - 1e-12);
  }
}

TEST(Rebalance, IsAsEvenAsAnAssignmentFromScratch) {
  std::mt19937 random(6);
  for (const int n_ranks : {2, 4, 8, 32})
    for (const double skew : {0.5, 1.0}) {
      const int n_redundant = 32;
      const std::vector<double> old_use = zipf(256, skew, random), use = zipf(256, skew, random);
      const OwnersOfLayer now = assign_balanced(old_use, {n_ranks}, n_redundant).owners;
      const OwnersOfLayer then = rebalanced(now, use, {n_ranks});
      expect_sound(now, then, n_ranks);
      const double best =
          balancedness(assign_balanced(use, {n_ranks}, n_redundant).owners, use, n_ranks);
      EXPECT_GE(balancedness(then, use, n_ranks), best - 0.0101) << n_ranks << " ranks, " << skew;
    }
}

TEST(Rebalance, MovesFewExpertsWhereFewAreEnough) {
  std::mt19937 random(7);
  const int n_ranks = 4;
  std::vector<double> use = zipf(64, 0.5, random);
  const OwnersOfLayer now = assign_balanced(use, {n_ranks}, 0).owners;
  EXPECT_EQ(rebalanced(now, use, {n_ranks}), now) << "it is as even as it gets";
  use[3] += 0.3 * use[3] + 100000;
  const OwnersOfLayer then = rebalanced(now, use, {n_ranks});
  EXPECT_LE(arrivals(now, then), 12);
  EXPECT_GT(balancedness(then, use, n_ranks), 0.98);

  // Ranks that only exchange their numbers do not move anything: a hot expert gets a replica, which
  // swaps cannot give, and the rest stays where it was.
  OwnersOfLayer replicas = random_owners(64, n_ranks, 0, random);
  replicas[0] = {0, 1};
  replicas[1] = {2, 3};
  std::vector<double> one_hot(64, 1);
  one_hot[9] = 40;
  const OwnersOfLayer with_two = rebalanced(replicas, one_hot, {n_ranks});
  EXPECT_GE(with_two[9].size(), 2u);
  expect_sound(replicas, with_two, n_ranks);
}

// An assignment from scratch has the numbers of its ranks chosen for the experts that they have.
TEST(Rebalance, RanksAreNumberedSoThatExpertsStay) {
  std::mt19937 random(12);
  int n_moved = 0, n_all = 0;
  for (int round = 0; round < 40; ++round) {
    const std::vector<double> use = zipf(32, 0.9, random);
    // As even as it gets with other numbers, but for one rank's replicas of two hot experts.
    OwnersOfLayer now = assign_balanced(use, {4}, 4).owners;
    std::vector<int> number = {1, 2, 3, 0};
    for (std::vector<int>& ranks : now) {
      for (int& rank : ranks) rank = number[rank];
      std::sort(ranks.begin(), ranks.end());
    }
    std::vector<double> shifted = use;
    std::swap(shifted[0], shifted[1]);
    std::swap(shifted[2], *std::max_element(shifted.begin(), shifted.end()));
    n_moved += arrivals(now, rebalanced(now, shifted, {4}));
    n_all += 36;
  }
  EXPECT_LT(n_moved, n_all / 2) << "three quarters would move by chance";
}

TEST(Rebalance, HostsKeepTheirExpertsApart) {
  // EPLB's assignment puts a group's experts on one host; the numbers of its ranks change within
  // the host only.
  std::mt19937 random(8);
  const std::vector<double> use = zipf(32, 0.3, random);
  const RankLayout layout = {4, 2, 4};
  const BalancedOwners fresh = assign_balanced(use, layout, 8);
  const OwnersOfLayer then = rebalanced(fresh.owners, use, layout);
  EXPECT_EQ(then, fresh.owners);
}

// Plays a plan as ranks do, wave by wave.
void play(const RebalancePlan& plan, std::vector<LayerUse> layers) {
  const std::vector<int> room = spare_slots(layers);
  const auto layer_of = [&](int number) -> LayerUse& {
    return *std::find_if(layers.begin(), layers.end(),
                         [&](const LayerUse& l) { return l.layer == number; });
  };
  std::vector<std::vector<int>> first;
  for (const LayerUse& layer : layers)
    first.push_back(numbers(layer.owners, static_cast<int>(layer.ranks.n)));
  int64_t n_arrivals = 0;
  for (const std::vector<ExpertChange>& wave : plan.waves) {
    EXPECT_FALSE(wave.empty());
    std::vector<int> used(room.size());
    std::set<std::pair<int, int>> changed;
    for (const ExpertChange& change : wave) {
      EXPECT_TRUE(changed.emplace(change.layer, change.expert).second) << "one change a wave";
      LayerUse& layer = layer_of(change.layer);
      std::vector<int>& owners = layer.owners[change.expert];
      ASSERT_FALSE(change.ranks.empty());
      for (const int rank : change.ranks) {
        ASSERT_LT(rank, layer.ranks.n);
        const bool comes = std::find(owners.begin(), owners.end(), rank) == owners.end();
        used[layer.ranks.first + rank] += comes;
        n_arrivals += comes;
      }
      owners.assign(change.ranks.begin(), change.ranks.end());
    }
    for (size_t r = 0; r < room.size(); ++r) EXPECT_LE(used[r], room[r]);
    for (size_t l = 0; l < layers.size(); ++l) {
      const std::vector<int> now = numbers(layers[l].owners, static_cast<int>(layers[l].ranks.n));
      for (size_t r = 0; r < now.size(); ++r) EXPECT_LE(now[r], first[l][r]);
    }
  }
  EXPECT_EQ(n_arrivals, plan.n_arrivals);
  double after = 0, all = 0;
  for (const LayerUse& layer : layers) {
    const double use = std::accumulate(layer.use.begin(), layer.use.end(), 0.0);
    after += use * balancedness(layer.owners, layer.use, static_cast<int>(layer.ranks.n));
    all += use;
  }
  EXPECT_NEAR(plan.after, after / all, 1e-9);
}

TEST(RebalancePlan, EveryWaveFitsAndAllOfThemGiveWhatIsPromised) {
  std::mt19937 random(9);
  for (int round = 0; round < 60; ++round) {
    // Two pipeline stages of several ranks.
    const int n = 2 + static_cast<int>(random() % 4);
    std::vector<LayerUse> layers;
    for (int l = 0; l < 12; ++l)
      layers.push_back({.layer = 3 + l,
                        .ranks = {l < 6 ? 0 : n, n},
                        .owners = random_owners(24, n, static_cast<int>(random() % 5), random),
                        .use = zipf(24, l % 4 * 0.4, random)});
    const RebalancePlan plan = plan_rebalance(layers, {});
    EXPECT_GT(plan.n_layers, 0);
    EXPECT_GT(plan.after, plan.before);
    play(plan, layers);
  }
}

TEST(RebalancePlan, LayersThatAreEvenOrUnusedStay) {
  std::mt19937 random(10);
  std::vector<LayerUse> layers;
  for (int l = 0; l < 3; ++l)
    layers.push_back({.layer = l,
                      .ranks = {0, 2},
                      .owners = random_owners(8, 2, 0, random),
                      .use = std::vector<double>(8, l == 0 ? 0 : 5)});
  RebalancePlan plan = plan_rebalance(layers, {});
  EXPECT_TRUE(plan.waves.empty());
  EXPECT_EQ(plan.n_layers, 0);
  EXPECT_EQ(plan.before, 1);
  EXPECT_EQ(plan.after, 1);
  for (size_t e = 0; e < 8; ++e) layers[2].use[e] = layers[2].owners[e][0] == 0 ? 9 : 1;
  plan = plan_rebalance(layers, {});
  ASSERT_EQ(plan.waves.size(), 1u);
  for (const ExpertChange& change : plan.waves[0]) EXPECT_EQ(change.layer, 2);
  EXPECT_NEAR(plan.before, (40 * 1 + 40 * (20.0 / 36)) / 80, 1e-12);
  plan = plan_rebalance(layers, {.least_gain = 0.5});
  EXPECT_TRUE(plan.waves.empty()) << "a gain of 0.44 is less";
}

// Ranks 0 and 2 are fixed, as a backbone and a worker that keep theirs.
TEST(RebalancePlan, FixedRanksKeepTheirExperts) {
  const std::vector<bool> fixed = {true, false, true, false};
  const OwnersOfLayer owners = {{0}, {1}, {1}, {3}, {3}, {2}, {1, 2}};
  const std::vector<LayerUse> layers = {{3, {0, 4}, owners, {90, 8, 8, 1, 1, 50, 70}},
                                        {5, {0, 4}, owners, {9, 4, 4, 4, 4, 1, 70}}};
  EXPECT_NEAR(movable_balancedness(layers, fixed), (18 * (9.0 / 16) + 16 * 1.0) / 34, 1e-12);
  const RebalancePlan plan = plan_rebalance(layers, {.fixed = fixed});
  EXPECT_NEAR(plan.before, movable_balancedness(layers, fixed), 1e-12);
  EXPECT_NEAR(plan.after, 1, 1e-12);
  ASSERT_EQ(plan.waves.size(), 1u);
  EXPECT_EQ(plan.n_layers, 1);
  OwnersOfLayer after = owners;
  for (const ExpertChange& change : plan.waves[0]) {
    EXPECT_EQ(change.layer, 3);
    after.at(change.expert).assign(change.ranks.begin(), change.ranks.end());
  }
  for (const int expert : {0, 5, 6}) EXPECT_EQ(after[expert], owners[expert]) << expert;
  EXPECT_NE(after[1], after[2]);
  EXPECT_NE(after[3], after[4]);
  for (const int expert : {1, 2, 3, 4}) {
    ASSERT_EQ(after[expert].size(), 1u);
    EXPECT_TRUE(after[expert][0] == 1 || after[expert][0] == 3);
  }
  EXPECT_TRUE(plan_rebalance(layers, {.fixed = {true, false, true, true}}).waves.empty());
  EXPECT_EQ(movable_balancedness(layers, {true, true, true, true}), 1);
}

TEST(SpareSlots, AreTheMostExpertsOfALayer) {
  const std::vector<LayerUse> layers = {{0, {0, 2}, {{0}, {0}, {1}}, {1, 1, 1}},
                                        {1, {0, 2}, {{1}, {0, 1}, {1}}, {1, 1, 1}},
                                        {2, {2, 1}, {{0}}, {1}}};
  EXPECT_EQ(spare_slots(layers), (std::vector<int>{2, 3, 1}));
}

}  // namespace
}  // namespace tandem::test
