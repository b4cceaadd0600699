// Who gets which expert: against trying everything, on instances small enough for that.
#include "offload/plan/assign.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <random>

namespace tandem {
namespace {

using Shares = std::vector<std::vector<double>>;
using Seats = std::vector<ExpertSeat>;

// Least over all ways to seat all experts.
double least_seconds(const Shares& shares, const Seats& seats) {
  std::vector<std::pair<size_t, size_t>> items;
  for (size_t l = 0; l < shares.size(); ++l)
    for (size_t e = 0; e < shares[l].size(); ++e) items.emplace_back(l, e);
  std::vector<std::vector<int>> owners;
  for (const auto& layer : shares) owners.emplace_back(layer.size(), 0);
  double least = std::numeric_limits<double>::infinity();
  const auto n_ways =
      static_cast<int64_t>(std::pow(seats.size(), static_cast<double>(items.size())));
  for (int64_t way = 0; way < n_ways; ++way) {
    std::vector<int64_t> used(seats.size(), 0);
    int64_t rest = way;
    for (const auto& [l, e] : items) {
      owners[l][e] = static_cast<int>(rest % static_cast<int64_t>(seats.size()));
      rest /= static_cast<int64_t>(seats.size());
      ++used[owners[l][e]];
    }
    bool fits = true;
    for (size_t s = 0; s < seats.size(); ++s) fits &= used[s] <= seats[s].slots;
    if (fits) least = std::min(least, assigned_seconds(shares, seats, owners));
  }
  return least;
}

struct Instance {
  Shares shares;
  Seats seats;
};

Instance random_instance(std::mt19937& rng, int most_experts) {
  const auto real = [&](double low, double high) {
    return std::uniform_real_distribution<double>(low, high)(rng);
  };
  const auto whole = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(rng);
  };
  Instance instance;
  const int n_layers = whole(1, 3);
  const int n_experts = whole(1, most_experts / n_layers);
  for (int l = 0; l < n_layers; ++l) {
    instance.shares.emplace_back();
    for (int e = 0; e < n_experts; ++e)
      instance.shares.back().push_back(whole(0, 3) == 0 ? 0.25 : real(0, 1));  // some alike
  }
  instance.seats.push_back({1, 1000});
  for (int s = whole(1, 2); s > 0; --s)
    instance.seats.push_back({real(0.02, 1.5), whole(0, n_experts)});
  return instance;
}

TEST(AssignExperts, AsGoodAsTryingEverything) {
  std::mt19937 rng(1);
  for (int round = 0; round < 150; ++round) {
    const Instance i = random_instance(rng, round < 8 ? 12 : 9);
    const auto owners = assign_experts(i.shares, i.seats);
    EXPECT_NEAR(assigned_seconds(i.shares, i.seats, owners), least_seconds(i.shares, i.seats),
                1e-12)
        << "round " << round;
  }
}

TEST(AssignExperts, NeverMoreThanFit) {
  std::mt19937 rng(2);
  for (int round = 0; round < 200; ++round) {
    const Instance i = random_instance(rng, 60);
    std::vector<int64_t> used(i.seats.size(), 0);
    for (const auto& layer : assign_experts(i.shares, i.seats))
      for (const int seat : layer) ++used[seat];
    for (size_t s = 0; s < used.size(); ++s) EXPECT_LE(used[s], i.seats[s].slots);
  }
}

TEST(AssignExperts, LargeInstancesTakeTheHottestAndExactlyAsManyAsFit) {
  // A GPU 20 times as fast with room for 100 of 58 x 256 experts: the hundred most used.
  std::mt19937 rng(3);
  Shares shares(58, std::vector<double>(256));
  std::vector<double> all;
  for (auto& layer : shares)
    for (double& share : layer) {
      share = std::exponential_distribution<double>(1)(rng);
      all.push_back(share);
    }
  std::sort(all.rbegin(), all.rend());
  const auto owners = assign_experts(shares, {{1, 1 << 20}, {0.05, 100}});
  int n = 0;
  for (size_t l = 0; l < shares.size(); ++l)
    for (size_t e = 0; e < shares[l].size(); ++e) {
      EXPECT_EQ(owners[l][e] == 1, shares[l][e] >= all[99]);
      n += owners[l][e];
    }
  EXPECT_EQ(n, 100);
}

TEST(AssignExperts, AFastSeatIsNotGivenMoreThanItsPart) {
  // Both seats alike: with room for all, half of the work goes over.
  const Shares shares = {std::vector<double>(100, 0.5)};
  const Seats seats = {{1, 1000}, {1, 1000}};
  EXPECT_DOUBLE_EQ(assigned_seconds(shares, seats, assign_experts(shares, seats)), 25);
}

TEST(DealExperts, RanksGetAlikeAndEveryExpertAnOwner) {
  std::mt19937 rng(4);
  for (const int n_ranks : {1, 2, 3, 8, 32, 96, 144}) {
    for (const int n_redundant : {0, 1, 32}) {
      if (n_ranks == 1 && n_redundant > 0) continue;
      std::vector<double> shares(256);
      for (double& s : shares) s = std::exponential_distribution<double>(1)(rng);
      const auto owners = deal_experts(shares, n_ranks, n_redundant);
      std::vector<int> held(n_ranks, 0);
      int copies = 0;
      for (const auto& ranks : owners) {
        ASSERT_FALSE(ranks.empty());
        for (size_t i = 0; i < ranks.size(); ++i) {
          ++held[ranks[i]];
          if (i > 0) {
            EXPECT_LT(ranks[i - 1], ranks[i]) << "a rank has an expert twice";
          }
        }
        copies += static_cast<int>(ranks.size()) - 1;
      }
      EXPECT_EQ(copies, n_redundant);
      EXPECT_LE(*std::max_element(held.begin(), held.end()),
                (256 + n_redundant + n_ranks - 1) / n_ranks);
    }
  }
}

TEST(DealExperts, CopiesGoToTheHottestAndEvenTheLoad) {
  // One expert takes half of all: with three more copies it is no longer the worst.
  std::vector<double> shares(8, 0.5 / 7);
  shares[5] = 0.5;
  const auto owners = deal_experts(shares, 4, 4);
  EXPECT_EQ(owners[5].size(), 4u);
  std::vector<double> load(4, 0);
  for (int e = 0; e < 8; ++e)
    for (const int rank : owners[e]) load[rank] += shares[e] / owners[e].size();
  const double busiest = *std::max_element(load.begin(), load.end());
  EXPECT_LT(busiest, 1.2 / 4);
}

}  // namespace
}  // namespace tandem
