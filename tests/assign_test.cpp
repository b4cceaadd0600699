// Assignment of experts to ranks.
#include "offload/plan/assign.h"

#include <gtest/gtest.h>

#include <algorithm>
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

}  // namespace
}  // namespace tandem
