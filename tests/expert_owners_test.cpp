// Which replica of an expert computes a token.
#include "offload/ranks/expert_owners.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

namespace tandem {
namespace {

constexpr int kExperts = 32, kActive = 4;

std::vector<int32_t> random_ids(std::mt19937& rng, int n_tokens) {
  std::vector<int32_t> ids, all(kExperts);
  for (int e = 0; e < kExperts; ++e) all[e] = e;
  for (int t = 0; t < n_tokens; ++t) {
    std::shuffle(all.begin(), all.end(), rng);
    ids.insert(ids.end(), all.begin(), all.begin() + kActive);
  }
  return ids;
}
TensorView view(std::vector<int32_t>& ids) {
  return {ids.data(), std::ssize(ids) / kActive, kActive, kActive, DType::kI32};
}

// Every expert on one of six ranks, and the even ones on three.
ExpertOwners six_ranks(ReplicaChoice choice, RankHosts hosts = {0, 2}) {
  ExpertOwners owners(1, kExperts, hosts, choice);
  for (int e = 0; e < kExperts; ++e) {
    owners.add(0, e, e % 6);
    if (e % 2 == 0)
      for (const int next : {1, 3}) owners.add(0, e, (e + next) % 6);
  }
  return owners;
}

TEST(ReplicaChoice, IsTheSameRankThenTheSameHost) {
  std::mt19937 rng(1);
  struct Case {
    std::vector<int> host_of_rank;  // of more ranks than six
    int first;
  };
  for (const auto& [host_of_rank, first] : {Case{{0, 0, 1, 1, 2, 2, 3, 3}, 0},
                                            {{0, 0, 1, 1, 2, 2, 3, 3}, 1},
                                            {{0, 1, 2, 0, 1, 2, 0, 1, 2}, 0},
                                            {{0, 1, 2, 0, 1, 2, 0, 1, 2}, 2}}) {
    const ExpertOwners owners = six_ranks(ReplicaChoice::kNearest, rank_hosts(host_of_rank, first));
    ReplicaChooser chooser(owners);
    std::vector<int32_t> ids = random_ids(rng, 200), ranks(kActive);
    chooser.begin(0, view(ids));
    for (int t = 0; t < 200; ++t) {
      const int source = static_cast<int>(rng() % 6);
      chooser.choose(&ids[t * kActive], kActive, source, ranks.data());
      for (int k = 0; k < kActive; ++k) {
        const std::vector<int32_t>& all = owners.ranks(0, ids[t * kActive + k]);
        ASSERT_TRUE(std::count(all.begin(), all.end(), ranks[k])) << "an owner";
        const auto host = [&](int rank) { return host_of_rank[first + rank]; };
        const bool is_source = std::count(all.begin(), all.end(), source) > 0;
        const bool is_near =
            std::any_of(all.begin(), all.end(), [&](int r) { return host(r) == host(source); });
        EXPECT_TRUE(!is_source || ranks[k] == source);
        EXPECT_TRUE(!is_near || host(ranks[k]) == host(source));
      }
    }
  }
}

// Ranks in any other order, or of hosts with different numbers: none is nearer than another.
TEST(ReplicaChoice, KnowsNoHostsInOtherOrders) {
  for (const std::vector<int>& hosts : {std::vector<int>{},
                                        {0, 0, 0},
                                        {0, 1, 1},
                                        {0, 1, 1, 0},
                                        {0, 0, 1, 2, 1, 2},
                                        {0, 1, 0, 2, 2, 1}}) {
    const RankHosts got = rank_hosts(hosts, 0);
    for (int rank = 0; rank < 6; ++rank) EXPECT_EQ(got.of(rank), 0);
  }
}

TEST(ReplicaChoice, DependsOnTheTokenAloneAndUsesAllReplicas) {
  std::mt19937 rng(2);
  const ExpertOwners owners = six_ranks(ReplicaChoice::kNearest);
  ReplicaChooser chooser(owners), other(owners);
  std::vector<int32_t> ids = random_ids(rng, 3000), beside = random_ids(rng, 5);
  chooser.begin(0, view(ids));
  other.begin(0, view(beside));
  std::map<int, std::map<int, int>> n_of;  // of expert and rank
  for (int t = 0; t < 3000; ++t) {
    std::vector<int32_t> ranks(kActive), again(kActive);
    chooser.choose(&ids[t * kActive], kActive, -1, ranks.data());
    other.choose(&ids[t * kActive], kActive, -1, again.data());
    EXPECT_EQ(ranks, again);
    for (int k = 0; k < kActive; ++k) ++n_of[ids[t * kActive + k]][ranks[k]];
  }
  for (auto& [expert, n_of_rank] : n_of) {
    const std::vector<int32_t>& all = owners.ranks(0, expert);
    const int expected = 3000 * kActive / kExperts / static_cast<int>(all.size());
    for (const int rank : all) EXPECT_NEAR(n_of_rank[rank], expected, 0.3 * expected);
  }
}

// The ranks of all rows, and the rows of each expert on each rank.
std::map<int, std::map<int, int>> chosen(const ExpertOwners& owners, std::vector<int32_t>& ids) {
  ReplicaChooser chooser(owners);
  chooser.begin(0, view(ids));
  std::map<int, std::map<int, int>> n_of;
  std::vector<int32_t> ranks(kActive);
  for (size_t t = 0; t < ids.size() / kActive; ++t) {
    chooser.choose(&ids[t * kActive], kActive, 0, ranks.data());
    for (int k = 0; k < kActive; ++k)
      if (ids[t * kActive + k] >= 0) ++n_of[ids[t * kActive + k]][ranks[k]];
  }
  return n_of;
}

TEST(ReplicaChoice, LeastLoadedReadsAnExpertOnceAndEvensTheRanks) {
  std::mt19937 rng(3);
  const ExpertOwners owners = six_ranks(ReplicaChoice::kLeastLoaded);
  const ExpertOwners nearest = six_ranks(ReplicaChoice::kNearest);
  double busiest = 0, busiest_nearest = 0;
  for (int round = 0; round < 50; ++round) {
    std::vector<int32_t> ids = random_ids(rng, 6);
    const auto most_read = [](const std::map<int, std::map<int, int>>& n_of) {
      std::map<int, int> n_read;
      for (const auto& [expert, n_of_rank] : n_of)
        for (const auto& [rank, n] : n_of_rank) ++n_read[rank];
      int most = 0;
      for (const auto& [rank, n] : n_read) most = std::max(most, n);
      return most;
    };
    const auto n_of = chosen(owners, ids);
    for (const auto& [expert, n_of_rank] : n_of) EXPECT_EQ(n_of_rank.size(), 1u) << "read once";
    busiest += most_read(n_of);
    busiest_nearest += most_read(chosen(nearest, ids));
  }
  EXPECT_LT(busiest, 0.9 * busiest_nearest);
}

TEST(ReplicaChoice, LeastLoadedDividesExpertsThatAllRanksHave) {
  ExpertOwners owners(1, kExperts, {}, ReplicaChoice::kLeastLoaded);
  for (int e = 0; e < kExperts; ++e)
    for (int rank = 0; rank < 4; ++rank) owners.add(0, e, rank);
  std::vector<int32_t> ids = {3, 9, 21, 30};
  std::map<int, int> n_of_rank;
  for (const auto& [expert, ranks] : chosen(owners, ids)) ++n_of_rank[ranks.begin()->first];
  EXPECT_EQ(n_of_rank.size(), 4u) << "an expert each";
}

TEST(ReplicaChoice, LeastLoadedForgetsTheBatchBefore) {
  const ExpertOwners owners = six_ranks(ReplicaChoice::kLeastLoaded);
  std::mt19937 rng(8);
  ReplicaChooser used(owners);
  std::vector<int32_t> before = random_ids(rng, 300), ids = random_ids(rng, 5);
  used.begin(0, view(before));
  used.begin(0, view(ids));
  ReplicaChooser fresh(owners);
  fresh.begin(0, view(ids));
  for (int t = 0; t < 5; ++t) {
    std::vector<int32_t> got(kActive), want(kActive);
    used.choose(&ids[t * kActive], kActive, 0, got.data());
    fresh.choose(&ids[t * kActive], kActive, 0, want.data());
    EXPECT_EQ(got, want);
  }
}

TEST(ReplicaChoice, LeastLoadedDividesAnExpertOfManyRows) {
  const ExpertOwners owners = six_ranks(ReplicaChoice::kLeastLoaded);
  std::mt19937 rng(4);
  std::vector<int32_t> ids = random_ids(rng, 400);
  for (int t = 0; t < 400; ++t)
    if (!std::count(&ids[t * kActive], &ids[(t + 1) * kActive], 8)) ids[t * kActive] = 8;
  const auto n_of = chosen(owners, ids);
  ASSERT_EQ(n_of.at(8).size(), 3u);
  for (const auto& [rank, n] : n_of.at(8)) EXPECT_NEAR(n, 400 / 3, 60);
}

TEST(ReplicaChoice, NoExpertHasNoRank) {
  ExpertOwners owners(2, kExperts);
  owners.add(1, 3, 5);
  owners.add(1, 3, 7);
  EXPECT_TRUE(owners.has_replicas());
  EXPECT_FALSE(owners.has_replicas(0));
  EXPECT_TRUE(owners.has_replicas(1));
  std::vector<int32_t> ids = {3, -1, 4, 3}, ranks(kActive);
  ReplicaChooser chooser(owners);
  chooser.begin(1, view(ids));
  chooser.choose(ids.data(), kActive, 7, ranks.data());
  EXPECT_EQ(ranks, (std::vector<int32_t>{7, -1, -1, 7}));
}

TEST(ExpertOwners, AreReplacedWhileTheModelRuns) {
  ExpertOwners owners(2, 3, {}, ReplicaChoice::kLeastLoaded);
  for (int layer = 0; layer < 2; ++layer)
    for (int e = 0; e < 3; ++e) owners.add(layer, e, e % 2);
  ReplicaChooser chooser(owners);
  EXPECT_EQ(owners.n_ranks(), 2);
  owners.apply(
      std::vector<ExpertChange>{{1, 2, {1, 4}}});  // rank 4 had no expert when the chooser was made
  EXPECT_EQ(owners.n_ranks(), 5);
  EXPECT_EQ(owners.ranks(1, 2), (std::vector<int32_t>{1, 4}));
  EXPECT_EQ(owners.ranks(0, 2), (std::vector<int32_t>{0})) << "another layer";
  EXPECT_TRUE(owners.has_replicas(1));
  EXPECT_FALSE(owners.has_replicas(0));
  std::vector<int32_t> ids = {1, 2}, ranks(2);
  const TensorView batch = {ids.data(), 1, 2, 2, DType::kI32};
  chooser.begin(1, batch);
  chooser.choose(ids.data(), 2, -1, ranks.data());
  EXPECT_EQ(ranks, (std::vector<int32_t>{1, 4})) << "rank 1 has expert 1 to compute";
  owners.apply(std::vector<ExpertChange>{{1, 2, {0}}});
  EXPECT_FALSE(owners.has_replicas(1));
  chooser.begin(1, batch);
  chooser.choose(ids.data(), 2, -1, ranks.data());
  EXPECT_EQ(ranks, (std::vector<int32_t>{1, 0}));
}

}  // namespace
}  // namespace tandem
