// Assignment of experts to ranks.
#include "offload/balance/assign.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <random>

namespace tandem {
namespace {

TEST(DealExperts, RanksGetAlikeAndEveryExpertAnOwner) {
  std::mt19937 rng(4);
  for (const int n_ranks : {1, 2, 3, 8, 32, 96, 144}) {
    for (const int n_redundant : {0, 1, 32}) {
      if (n_ranks == 1 && n_redundant > 0) continue;
      std::vector<double> shares(256);
      for (double& s : shares) s = std::exponential_distribution<double>(1)(rng);
      const auto owners = assign_experts(shares, n_ranks, n_redundant);
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
  // One expert gets half of all tokens. With three more copies it is no longer the bottleneck.
  std::vector<double> shares(8, 0.5 / 7);
  shares[5] = 0.5;
  const auto owners = assign_experts(shares, 4, 4);
  EXPECT_EQ(owners[5].size(), 4u);
  std::vector<double> load(4, 0);
  for (int e = 0; e < 8; ++e)
    for (const int rank : owners[e]) load[rank] += shares[e] / owners[e].size();
  const double busiest = *std::max_element(load.begin(), load.end());
  EXPECT_LT(busiest, 1.2 / 4);
}

TEST(DealExperts, PairsAreSwappedUntilLoadsAreEven) {
  // The heaviest first into the emptier of two ranks of three slots gives 1.5 and 1.3.
  const auto owners = assign_experts({0.7, 0.6, 0.5, 0.4, 0.4, 0.2}, 2, 0);
  EXPECT_GT(balancedness(owners, {0.7, 0.6, 0.5, 0.4, 0.4, 0.2}, 2), 0.999);
}

TEST(Balancedness, IsMeanOverLargest) {
  // Rank 0 has 0.5 and half of 0.4, rank 1 half of 0.4, rank 2 has 0.1.
  EXPECT_NEAR(balancedness({{0}, {0, 1}, {2}}, {0.5, 0.4, 0.1}, 3), 1.0 / 3 / 0.7, 1e-12);
  EXPECT_EQ(balancedness({{0}, {1}}, {0, 0}, 2), 1);
}

// Shares of experts of which each token chooses 8 different ones with probabilities in proportion
// to n^-skew, in a random order.
std::vector<double> skewed_shares(double skew, std::mt19937& rng) {
  constexpr int kExperts = 256, kActive = 8, kTokens = 20'000;
  std::vector<double> inverse(kExperts), share(kExperts, 0);
  for (int e = 0; e < kExperts; ++e) inverse[e] = std::pow(e + 1, skew);
  std::shuffle(inverse.begin(), inverse.end(), rng);
  for (int t = 0; t < kTokens; ++t) {
    // The smallest of exponential draws: a choice without repetition.
    std::vector<std::pair<double, int>> draws;
    for (int e = 0; e < kExperts; ++e)
      draws.emplace_back(std::exponential_distribution<double>()(rng) * inverse[e], e);
    std::partial_sort(draws.begin(), draws.begin() + kActive, draws.end());
    for (int k = 0; k < kActive; ++k) share[draws[k].second] += 1.0 / kTokens;
  }
  return share;
}

// The largest balancedness that any assignment of these many replicas may have, if every rank has
// as many. With n heaviest replicas on ranks of their own, these ranks have the lightest ones
// beside them at best; and where two share a rank, it has twice the n-th.
double best_balancedness(const std::vector<double>& shares, int n_ranks, int n_redundant) {
  std::vector<int> copies(shares.size(), 1);
  for (int i = 0; i < n_redundant; ++i) {
    size_t hot = 0;
    for (size_t e = 1; e < shares.size(); ++e)
      if (shares[e] / copies[e] > shares[hot] / copies[hot]) hot = e;
    ++copies[hot];
  }
  std::vector<double> replicas;
  for (size_t e = 0; e < shares.size(); ++e)
    replicas.insert(replicas.end(), copies[e], shares[e] / copies[e]);
  std::sort(replicas.begin(), replicas.end(), std::greater<>());
  const int others = static_cast<int>(replicas.size()) / n_ranks - 1;
  const double mean = std::accumulate(shares.begin(), shares.end(), 0.0) / n_ranks;
  double least = mean, sum = 0;
  for (int n = 1; n <= n_ranks; ++n) {
    sum += replicas[n - 1];
    for (int i = 0; i < others; ++i) sum += replicas[replicas.size() - 1 - (n - 1) * others - i];
    least = std::max(least, std::min(sum / n, n > 1 ? 2 * replicas[n - 1] : sum));
  }
  return mean / least;
}

TEST(AssignBalanced, SkewedRoutingIsEvenWith32Redundant) {
  std::mt19937 rng(29);
  for (const double skew : {0.5, 1.0}) {
    const std::vector<double> shares = skewed_shares(skew, rng);
    for (const int n_ranks : {8, 32, 96}) {
      const BalancedOwners balanced = assign_balanced(shares, {n_ranks, n_ranks / 8, 8}, 32);
      const double even = balancedness(balanced.owners, shares, n_ranks);
      const double most = best_balancedness(shares, n_ranks, 32);
      SCOPED_TRACE(testing::Message()
                   << "skew " << skew << ", " << n_ranks << " ranks: " << even << ", at most "
                   << most << "; own " << balanced.own << ", EPLB " << balanced.eplb);
      EXPECT_GE(even, 0.99 * most);
      EXPECT_EQ(even, std::max(balanced.own, balanced.eplb));
      OwnersOfLayer dealt(256);
      for (int e = 0; e < 256; ++e) dealt[e] = {e * n_ranks / 256};
      EXPECT_GE(even, balancedness(dealt, shares, n_ranks)) << "never worse than before";
    }
  }
}

TEST(AssignBalanced, TakesTheMoreEvenOfTwo) {
  std::mt19937 rng(7);
  int by_eplb = 0;
  for (int i = 0; i < 300; ++i) {
    std::vector<double> shares(24);
    for (double& s : shares) s = std::exponential_distribution<double>(1)(rng);
    const BalancedOwners b = assign_balanced(shares, {4, 2, i % 2 ? 4 : 1}, 8);
    EXPECT_EQ(balancedness(b.owners, shares, 4), b.by_eplb ? b.eplb : b.own);
    EXPECT_EQ(b.by_eplb, b.eplb > b.own);
    EXPECT_GT(b.eplb, 0.4);
    by_eplb += b.by_eplb;
    size_t n_replicas = 0;
    for (const std::vector<int>& ranks : b.owners) n_replicas += ranks.size();
    EXPECT_EQ(n_replicas, 32u) << "also where EPLB has an expert twice on a rank";
    for (const std::vector<int>& ranks : b.owners) {
      EXPECT_FALSE(ranks.empty());
      EXPECT_TRUE(std::adjacent_find(ranks.begin(), ranks.end(), std::greater_equal<>()) ==
                  ranks.end())
          << "ascending, none twice";
    }
  }
  EXPECT_GT(by_eplb, 0);
  EXPECT_LT(by_eplb, 300);
  EXPECT_EQ(assign_balanced(std::vector<double>(24, 1), {5, 1, 1}, 3).eplb, 0) << "27 slots of 5";
}

}  // namespace
}  // namespace tandem
