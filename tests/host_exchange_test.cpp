// Rows that cross once to each host, with hosts of several and of one rank: which rank sends what
// to which, sums in every format, many steps with and without rows, and the bytes between hosts.
#include <gtest/gtest.h>

#include <atomic>
#include <mutex>
#include <set>
#include <thread>

#include "comm/delayed.h"
#include "comm/host_groups.h"
#include "comm/hosts.h"
#include "comm/local_ranks.h"
#include "core/clock.h"
#include "ops/router.h"
#include "tests/error_of.h"
#include "tests/exchange_cases.h"
#include "tests/planner_cases.h"

namespace tandem::test {
namespace {

// Hosts of ranks.
using Hosts = std::vector<int>;
const Hosts kTwoOfTwo = {0, 0, 1, 1}, kTwoOfFour = {0, 0, 0, 0, 1, 1, 1, 1},
            kFourOfTwo = {0, 0, 1, 1, 2, 2, 3, 3}, kThreeAndOne = {0, 0, 0, 1},
            kOneAndThree = {0, 1, 1, 1}, kInTurns = {7, 4, 7, 4},
            kFiveTwoOne = {0, 0, 0, 0, 0, 1, 1, 2}, kOneEach = {0, 1, 2, 3}, kOneHost = {3, 3, 3};

std::string name_of(const Hosts& hosts) { return fmt::format("hosts {}", fmt::join(hosts, ",")); }

TEST(HostLayout, NumbersHostsAndRanks) {
  const HostLayout layout(kInTurns);
  EXPECT_EQ(layout.n_ranks(), 4);
  EXPECT_EQ(layout.n_hosts(), 2);
  EXPECT_EQ(layout.host_of_rank(), (Hosts{0, 1, 0, 1}));
  EXPECT_EQ(layout.ranks_of(1), (std::vector{1, 3}));
  EXPECT_EQ(layout.number_in_host(2), 1);
  EXPECT_EQ(layout.gateway(2, 1), 3);
  EXPECT_EQ(layout.gateway(1, 0), 0);
  // There is one plane; the ranks of a host share what comes from others.
  const HostLayout uneven(kFiveTwoOne);
  EXPECT_EQ(uneven.ranks_of(0), (std::vector{0, 1, 2, 3, 4}));
  EXPECT_EQ(uneven.gateway(5, 0), 0);
  EXPECT_EQ(uneven.gateway(6, 0), 1);
  EXPECT_EQ(uneven.gateway(3, 1), 6);
  EXPECT_EQ(uneven.gateway(4, 1), 5);
}

// What is split from a group has its patience of that time, which is long while models are loaded.
// Rank 3 stops, for which rank 2 waits within their host, or rank 1 in their plane.
TEST(HostGroups, NoticeALostRank) {
  for (const int waiting : {2, 1}) {
    std::atomic<bool> noticed{false};
    const auto begin = Clock::now();
    run_local_ranks({4}, [&](Group& group) {
      group.set_patience({std::chrono::seconds(30)});
      HostGroups groups(group, HostLayout(kTwoOfTwo));
      groups.set_patience({std::chrono::milliseconds(300)});
      while (group.rank() == 3 && !noticed)
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      if (group.rank() != waiting) return;
      try {
        (waiting == 2 ? groups.within() : groups.plane()).barrier();
        ADD_FAILURE() << "rank " << waiting << " goes on";
      } catch (const GroupError& error) {
        EXPECT_EQ(error.lost, 3);
      }
      noticed = true;
    });
    EXPECT_LT(seconds_since(begin), 20);
  }
}

TEST(HostLayout, HasTwoLevelsWhereAHostOfSeveralHasSeveralRanks) {
  for (const Hosts& hosts : {kTwoOfTwo, kTwoOfFour, kThreeAndOne, kOneAndThree, kFiveTwoOne})
    EXPECT_TRUE(HostLayout(hosts).has_two_levels()) << name_of(hosts);
  EXPECT_FALSE(HostLayout(kOneEach).has_two_levels());
  EXPECT_FALSE(HostLayout(kOneHost).has_two_levels());
  EXPECT_FALSE(HostLayout({0}).has_two_levels());
}

TEST(HostLayout, HasEqualHostsWhereAllHaveAsManyOfSeveralRanks) {
  for (const Hosts& hosts : {kTwoOfTwo, kTwoOfFour, kInTurns, Hosts{0, 1, 2, 0, 1, 2}})
    EXPECT_TRUE(HostLayout(hosts).has_equal_hosts()) << name_of(hosts);
  for (const Hosts& hosts : {kThreeAndOne, kOneAndThree, kFiveTwoOne, kOneEach, kOneHost})
    EXPECT_FALSE(HostLayout(hosts).has_equal_hosts()) << name_of(hosts);
}

// A gateway is on the host and in the plane, and the ranks of a plane that a host has divide what
// comes from others.
TEST(HostLayout, GatewaysAreInThePlane) {
  std::mt19937 random(1);
  for (int round = 0; round < 300; ++round) {
    Hosts hosts;
    const int n_hosts = 1 + static_cast<int>(random() % 5);
    for (int r = 0; r < 1 + round % 24; ++r) hosts.push_back(static_cast<int>(random() % n_hosts));
    const HostLayout layout(hosts);
    std::vector<int> n_sources(hosts.size());
    size_t fewest = hosts.size();
    for (int host = 0; host < layout.n_hosts(); ++host)
      fewest = std::min(fewest, layout.ranks_of(host).size());
    for (int r = 0; r < layout.n_ranks(); ++r) {
      EXPECT_EQ(layout.ranks_of(layout.host_of(r))[layout.number_in_host(r)], r);
      EXPECT_LT(layout.plane_of(r), static_cast<int>(fewest));
      for (int host = 0; host < layout.n_hosts(); ++host) {
        if (host == layout.host_of(r)) continue;
        const int gateway = layout.gateway(r, host);
        ++n_sources[gateway];
        ASSERT_EQ(layout.host_of(gateway), host);
        ASSERT_EQ(layout.plane_of(gateway), layout.plane_of(r));
        const bool alike = layout.n_ranks() == layout.n_hosts() * static_cast<int>(fewest);
        EXPECT_TRUE(!alike || layout.number_in_host(gateway) == layout.number_in_host(r));
      }
    }
    for (int host = 0; host < layout.n_hosts(); ++host) {
      int most = 0;
      for (const int r : layout.ranks_of(host)) {
        EXPECT_EQ(layout.n_sources(r), n_sources[r]);
        most = std::max(most, n_sources[r]);
      }
      EXPECT_EQ(layout.most_sources_on(host), most);
    }
  }
}

TEST(HostLayout, OfSimulatedHosts) {
  EXPECT_EQ(simulated_hosts_of_ranks({3, 1}, 4), kThreeAndOne);
  for (const std::vector<int>& wrong :
       {std::vector{2, 1}, std::vector{2, 3}, std::vector{4, 0}, std::vector{-1, 5}})
    EXPECT_TRUE(says(error_of([&] { simulated_hosts_of_ranks(wrong, 4); }),
                     fmt::format("--simulate-hosts {}: there are 4 ranks", fmt::join(wrong, ","))));
}

std::vector<ExchangeKind> all_to_all_kinds() {
  std::vector<ExchangeKind> kinds = exchange_kinds();
  std::erase_if(kinds, [](const ExchangeKind& k) { return k.mode != ExchangeMode::kAllToAll; });
  return kinds;
}

void check_on_hosts(const Hosts& hosts, const ExchangeKind& kind, int64_t dim, int n_cases) {
  const cpu::KernelTable kernels = cpu::kernels_for(cpu::best_isa());
  SCOPED_TRACE(name_of(hosts));
  run_local_ranks({static_cast<int>(hosts.size())}, [&](Group& group) {
    HostGroups groups(group, HostLayout(hosts));
    check_exchange(groups, kernels, kind, dim, n_cases);
  });
}

// 300 columns are no multiple of a block with one scale, 7 none of anything.
TEST(HostExchange, EveryLayoutAndFormat) {
  for (const Hosts& hosts : {kTwoOfTwo, kTwoOfFour, kFourOfTwo, kThreeAndOne, kOneAndThree,
                             kInTurns, kFiveTwoOne, kOneEach})
    for (const ExchangeKind& kind : all_to_all_kinds())
      check_on_hosts(hosts, kind, hosts.size() == 4 ? 300 : 7, hosts.size() == 4 ? 12 : 8);
}

// 3 layers a case, of which many have ranks without rows.
TEST(HostExchange, ThousandsOfSteps) {
  const int n_cases = TANDEM_SANITIZED ? 60 : 500;
  using enum RowFormat;
  constexpr auto kPerRank = ReturnedRows::kPerRank;
  check_on_hosts(kTwoOfTwo, {ExchangeMode::kAllToAll, kFp8, kBf16, kPerRank}, 7, n_cases);
  check_on_hosts(kThreeAndOne, {ExchangeMode::kAllToAll, kBf16, kF32, kPerRank}, 7, n_cases);
  check_on_hosts(kFourOfTwo, {ExchangeMode::kAllToAll, kF32, kBf16, kPerRank}, 7, n_cases / 2);
}

// As containers of one machine may be.
TEST(HostExchange, RanksOfAHostNeedNoSharedMemory) {
  const cpu::KernelTable kernels = cpu::kernels_for(cpu::best_isa());
  run_local_ranks({4}, [&](Group& group) {
    const auto apart = make_delayed(group, {.host_of_rank = kOneEach});
    for (const Hosts& hosts : {kTwoOfTwo, kThreeAndOne}) {
      HostGroups groups(*apart, HostLayout(hosts));
      EXPECT_THROW(groups.within().size() > 1 ? groups.within().allocate_window(64)
                                              : throw Error("one rank"),
                   Error);
      for (const ExchangeKind& kind : all_to_all_kinds())
        check_exchange(groups, kernels, kind, 300, 6);
    }
  });
}

// R1's routing: 8 of 256 experts, of 4 of 8 groups.
struct Traffic {
  int64_t once_to_each_host, to_each_rank;   // counted bytes between hosts
  int64_t n_hosts_of_rows, n_ranks_of_rows;  // other hosts, and ranks there, that a row goes to
  int64_t n_rows;
};

// FP8 and scales there, BF16 back, with experts dealt to ranks in turns or in rows of their
// numbers.
Traffic traffic_on(const Hosts& hosts, bool in_turns) {
  const ModelConfig config = known_model("r1");
  const cpu::KernelTable kernels = cpu::kernels_for(cpu::best_isa());
  const auto n_ranks = static_cast<int>(hosts.size());
  constexpr int kTokens = 2, kRounds = 8, kLayer = 3;
  const ExchangeShape shape = {.dim = static_cast<int>(config.dim),
                               .n_active = config.router.n_active,
                               .max_tokens = kTokens,
                               .there = RowFormat::kFp8,
                               .back = RowFormat::kBf16};
  ExpertOwners owners(config.n_layers, config.router.n_experts);
  const int n_experts = config.router.n_experts;
  for (int e = 0; e < n_experts; ++e)
    owners.add(kLayer, e, in_turns ? e % n_ranks : e * n_ranks / n_experts);
  Traffic all = {};
  std::mutex mutex;
  run_local_ranks({n_ranks}, [&](Group& group) {
    const HostLayout layout(hosts);
    Traffic mine = {};
    for (const bool once : {true, false}) {
      std::atomic<int64_t> sent{0};
      const auto counted = make_delayed(group, {.host_of_rank = hosts, .bytes_sent = &sent});
      const HostGroups groups(*counted, layout);
      ExchangeShape of_way = shape;
      of_way.once_to_each_host = once;
      const auto exchange = make_exchange(ExchangeMode::kAllToAll, groups, owners, kernels, of_way);
      std::mt19937 same(group.rank());
      for (int round = 0; round < kRounds; ++round) {
        std::vector<int32_t> ids = random_experts(config.router, kTokens, same);
        std::vector<float> x(kTokens * config.dim, 1), y(x.size()), weights(ids.size(), 1);
        const int64_t dim = config.dim, k = shape.n_active;
        const ExpertBatch batch = exchange->dispatch(
            {kLayer,
             {x.data(), kTokens, dim, dim},
             {{ids.data(), kTokens, k, k, DType::kI32}, {weights.data(), kTokens, k, k}}});
        std::vector<float> sums(batch.x.rows * dim);
        exchange->combine({sums.data(), batch.x.rows, dim, dim}, {y.data(), kTokens, dim, dim});
        for (int t = 0; t < kTokens && once; ++t) {
          std::set<int> far_hosts, far_ranks;
          for (int i = 0; i < k; ++i) {
            const int rank = owners.ranks(kLayer, ids[t * k + i])[0];
            if (layout.host_of(rank) == layout.host_of(group.rank())) continue;
            far_hosts.insert(layout.host_of(rank));
            far_ranks.insert(rank);
          }
          ++mine.n_rows;
          mine.n_hosts_of_rows += std::ssize(far_hosts);
          mine.n_ranks_of_rows += std::ssize(far_ranks);
        }
      }
      (once ? mine.once_to_each_host : mine.to_each_rank) = sent;
    }
    const std::lock_guard lock(mutex);
    all.once_to_each_host += mine.once_to_each_host;
    all.to_each_rank += mine.to_each_rank;
    all.n_hosts_of_rows += mine.n_hosts_of_rows;
    all.n_ranks_of_rows += mine.n_ranks_of_rows;
    all.n_rows += mine.n_rows;
  });
  // A row of 7,392 bytes with lists in lines of 64, a sum of 14,336, and 8 bytes for each pair of
  // ranks that tell each other a number.
  constexpr int64_t kRow = 7488 + 14336;
  int64_t pairs = 0, pairs_of_planes = 0;
  const HostLayout layout(hosts);
  for (int a = 0; a < n_ranks; ++a)
    for (int b = 0; b < n_ranks; ++b) {
      pairs += layout.host_of(a) != layout.host_of(b);
      pairs_of_planes +=
          layout.host_of(a) != layout.host_of(b) && layout.plane_of(a) == layout.plane_of(b);
    }
  EXPECT_EQ(all.once_to_each_host, all.n_hosts_of_rows * kRow + kRounds * 8 * pairs_of_planes);
  EXPECT_EQ(all.to_each_rank, all.n_ranks_of_rows * kRow + kRounds * 8 * pairs);
  fmt::print(
      "{} hosts, {} ranks, {}: of a row {:.2f} KB between hosts, {:.2f} to each rank, {:.2f}\n",
      layout.n_hosts(), n_ranks, in_turns ? "in turns" : "in rows",
      all.once_to_each_host / 1024. / all.n_rows, all.to_each_rank / 1024. / all.n_rows,
      double(all.to_each_rank) / double(all.once_to_each_host));
  return all;
}

Hosts alike_hosts(int n_hosts, int n_ranks) {
  Hosts hosts;
  for (int r = 0; r < n_hosts * n_ranks; ++r) hosts.push_back(r / n_ranks);
  return hosts;
}

TEST(HostExchange, ARowCrossesOnceToEachHost) {
  const auto ratio = [](const Traffic& t) {
    return static_cast<double>(t.to_each_rank) / static_cast<double>(t.once_to_each_host);
  };
  EXPECT_GT(ratio(traffic_on(alike_hosts(2, 8), true)), 2.5);
  EXPECT_GT(ratio(traffic_on(alike_hosts(4, 8), true)), 1.7);
  EXPECT_GT(ratio(traffic_on(alike_hosts(4, 8), false)), 1.7);
  EXPECT_GT(ratio(traffic_on(alike_hosts(2, 2), true)), 1.5);
}

}  // namespace
}  // namespace tandem::test
