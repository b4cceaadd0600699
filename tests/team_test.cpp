#include "core/team.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <chrono>

#include "core/check.h"
#include "core/progress_watch.h"
#include "tests/topologies.h"

namespace tandem {
namespace {

TEST(Team, RunsEveryItemOnce) {
  Team team(std::min(n_cores(), 4));
  for (const int n : {0, 1, 2, 3, 7, 64, 1000}) {
    std::vector<std::atomic<int>> calls(n);
    std::atomic<bool> bad_thread{false};
    team.run(n, [&](int64_t item, int thread) {
      ++calls[item];
      if (thread < 0 || thread >= team.size()) bad_thread = true;
    });
    for (auto& c : calls) EXPECT_EQ(c, 1);
    EXPECT_FALSE(bad_thread);
  }
}

// Jobs follow each other so closely that late threads meet the next job; sometimes all threads
// sleep.
TEST(Team, ManyShortJobs) {
  Team team(0);
  int64_t total = 0;
  for (int job = 0; job < 20000; ++job) {
    const int n = 2 + job % 5;
    std::atomic<int64_t> sum{0};
    team.run(n, [&](int64_t item, int) { sum += item + job; });
    total += sum - int64_t{n} * (n - 1) / 2 - int64_t{n} * job;
    if (job % 4000 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(3));
  }
  EXPECT_EQ(total, 0);
}

TEST(Team, WritesAreVisibleAfterRun) {
  Team team(0);
  std::vector<int64_t> squares(4096);
  for (int round = 0; round < 50; ++round) {
    team.run(4096, [&](int64_t i, int) { squares[i] = i * i + round; });
    for (int64_t i = 0; i < 4096; ++i) ASSERT_EQ(squares[i], i * i + round);
  }
}

// One item takes long. The other threads compute the rest, so the job takes as long as that item.
TEST(Team, ASlowItemDelaysNoOther) {
  Team team(std::min(2, n_cores()));
  if (team.size() < 2) GTEST_SKIP() << "one core";
  std::vector<int> thread_of(9, -1);
  std::atomic<int> done{0};
  team.run(9, [&](int64_t item, int thread) {
    thread_of[item] = thread;
    if (item == 0) {
      for (int i = 0; i < 2000 && done < 8; ++i)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    } else {
      ++done;
    }
  });
  for (int i = 2; i < 9; ++i) EXPECT_NE(thread_of[i], thread_of[0]);
}

// Threads that sleep are woken by a job. The first item ends when another thread has begun one.
TEST(Team, AJobWakesThreadsThatSleep) {
  Team team(test::topology_of({2}));
  for (int round = 0; round < 3; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    std::atomic<int> n_begun{0};
    team.run(2, [&](int64_t, int) {
      ++n_begun;
      for (int i = 0; i < 5000 && n_begun < 2; ++i)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      EXPECT_EQ(n_begun, 2);
    });
  }
}

// Every beginning and every end of an item is an event. One item and the items of a single thread
// are no job.
TEST(Team, ProgressCountsItemsThatBeginAndEnd) {
  Team team(test::topology_of({1, 1}));
  EXPECT_FALSE(team.progress().has_work);
  const uint64_t idle = team.progress().events;
  team.run(1, [&](int64_t, int) {
    EXPECT_FALSE(team.progress().has_work);
    EXPECT_EQ(team.progress().events, idle);
  });
  for (const std::vector<int64_t>& n_items : {std::vector<int64_t>{5, 0}, {5, 0}}) {
    uint64_t last = team.progress().events;
    team.run_on_nodes(n_items, [&](int, int64_t item, int) {
      const WorkProgress now = team.progress();
      EXPECT_TRUE(now.has_work);
      EXPECT_EQ(now.events, last + (item > 0 ? 2 : now.events - last)) << "one ended, one began";
      last = now.events;
    });
    EXPECT_FALSE(team.progress().has_work);
    EXPECT_EQ(team.progress().events, last + 1);
  }
  team.run_on_nodes(std::vector<int64_t>{0, 1},
                    [&](int, int64_t, int) { EXPECT_TRUE(team.progress().has_work); });
  team.run(2, [&](int64_t, int) { EXPECT_TRUE(team.progress().has_work); });
  EXPECT_FALSE(team.progress().has_work);
  Team one(test::topology_of({1}));
  one.run(3, [&](int64_t, int) { EXPECT_FALSE(one.progress().has_work); });
}

// All threads are pinned before the team is ready, and each to another core.
TEST(Team, PinsEachThreadToItsCore) {
  const Topology topology = this_topology();
  if (!Pin(topology, topology.nodes[0].cpus[0]).holds()) GTEST_SKIP() << "not permitted";
  for (int round = 0; round < 20; ++round) EXPECT_EQ(Team(topology).n_unpinned(), 0);
  Team team(topology);
  for (int round = 0; round < 100; ++round)
    team.run_on_nodes(std::vector<int64_t>(team.n_nodes(), 2 * team.size()),
                      [&](int node, int64_t, int thread) {
                        cpu_set_t set;
                        sched_getaffinity(0, sizeof set, &set);
                        EXPECT_EQ(CPU_COUNT(&set), 1);
                        EXPECT_TRUE(CPU_ISSET(topology.nodes[node].cpus[thread], &set));
                      });
}

// Every item of a node runs once and in order, on that node's threads only.
TEST(Team, NodesDoTheirOwnItems) {
  for (const Topology& topology :
       {test::topology_of({1}), test::topology_of({3}), test::topology_of({1, 1}),
        test::topology_of({2, 1, 3}), test::topology_of({1, 1, 1, 1, 1, 1, 1, 2})}) {
    Team team(topology);
    EXPECT_EQ(team.n_unpinned(), team.size());
    for (int round = 0; round < 200; ++round) {
      std::vector<int64_t> n_items;
      for (int node = 0; node < team.n_nodes(); ++node) n_items.push_back((round + 3 * node) % 7);
      std::vector<std::vector<std::atomic<int>>> calls(team.n_nodes());
      std::vector<std::atomic<int64_t>> next(team.n_nodes());
      for (int node = 0; node < team.n_nodes(); ++node)
        calls[node] = std::vector<std::atomic<int>>(n_items[node]);
      std::atomic<int> strangers{0};
      team.run_on_nodes(n_items, [&](int node, int64_t item, int thread) {
        if (thread < 0 || thread >= team.size_of_node(node)) ++strangers;
        ++calls[node].at(item);
        wait_until([&] { return next[node] == item; });  // waits for the earlier items
        ++next[node];
      });
      for (const auto& of_node : calls)
        for (const auto& n : of_node) ASSERT_EQ(n, 1);
      ASSERT_EQ(strangers, 0);
      if (round % 50 == 0) {  // jobs of both kinds, with all threads asleep in between
        std::atomic<int> sum{0};
        team.run(100, [&](int64_t, int thread) { sum += thread < team.size() ? 1 : 0; });
        ASSERT_EQ(sum, 100);
        std::this_thread::sleep_for(std::chrono::milliseconds(3));
      }
    }
  }
}

// The threads of a node are always the same and run on cores of that node.
TEST(Team, ThreadsStayOnTheirNode) {
  Team team(test::topology_of({2, 2}));
  std::vector<std::vector<std::thread::id>> seen(4);
  for (int round = 0; round < 100; ++round)
    team.run_on_nodes(std::vector<int64_t>{5, 5}, [&](int node, int64_t, int thread) {
      auto& ids = seen[2 * node + thread];
      if (ids.empty() || ids.back() != std::this_thread::get_id())
        ids.push_back(std::this_thread::get_id());
    });
  for (const auto& ids : seen) EXPECT_LE(ids.size(), 1u);
  EXPECT_EQ(seen[0].empty() && seen[1].empty(), false);
  EXPECT_EQ(seen[2].empty() && seen[3].empty(), false);
}

double processor_seconds() {
  timespec t{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

TEST(Team, SleepsWhenIdle) {
  Team team(test::topology_of({2, 2}));
  team.run_on_nodes(std::vector<int64_t>{5, 5}, [](int, int64_t, int) {});
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const double before = processor_seconds();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  EXPECT_LT(processor_seconds() - before, 0.02);
}

TEST(Team, PollsWhileWorkIsExpected) {
  Team team(test::topology_of({2}));
  const auto processor_seconds_of = [](double seconds) {
    const double before = processor_seconds();
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    return processor_seconds() - before;
  };
  // A busy machine gives this process less of its cores: then it takes longer.
  const auto polls = [&] {
    double sum = 0;
    for (int i = 0; i < 50 && sum < 0.05; ++i) sum += processor_seconds_of(0.1);
    return sum >= 0.05;
  };
  processor_seconds_of(0.02);  // until all threads sleep
  {
    const Team::Awake awake(&team);
    EXPECT_TRUE(polls());
    team.run(5, [](int64_t, int) {});
    EXPECT_TRUE(polls()) << "after work too";
  }
  processor_seconds_of(0.02);
  EXPECT_LT(processor_seconds_of(0.2), 0.02);
}

// The watch is called once for an item that does not end, and not for many items that end.
TEST(ProgressWatch, SeesAnItemThatDoesNotEnd) {
  constexpr std::chrono::milliseconds kPatience(400);
  Team team(test::topology_of({2}));
  std::atomic<int> n_hangs{0};
  const ProgressWatch watch([&] { return team.progress(); }, kPatience, [&] { ++n_hangs; });
  team.run(16, [&](int64_t, int) { std::this_thread::sleep_for(kPatience / 8); });
  std::this_thread::sleep_for(2 * kPatience);  // idle
  EXPECT_EQ(n_hangs, 0);
  const auto start = std::chrono::steady_clock::now();
  std::chrono::steady_clock::duration until_seen{};
  team.run(2, [&](int64_t item, int) {
    while (item == 1 && n_hangs == 0) std::this_thread::sleep_for(kPatience / 16);
    if (item == 0) return;
    until_seen = std::chrono::steady_clock::now() - start;
    std::this_thread::sleep_for(kPatience / 2);  // it hangs on
  });
  EXPECT_GE(until_seen, kPatience / 2);
  EXPECT_LE(until_seen, 20 * kPatience);
  EXPECT_EQ(n_hangs, 1);
}

TEST(Team, UnpinsItsCallerWhenItEnds) {
  cpu_set_t before, after;
  sched_getaffinity(0, sizeof before, &before);
  { const Team team(0); }
  sched_getaffinity(0, sizeof after, &after);
  EXPECT_TRUE(CPU_EQUAL(&before, &after));
}

TEST(Team, RefusesMoreThreadsThanCores) {
  EXPECT_THROW(Team(n_cores() + 1), Error);
  EXPECT_THROW(Team(-1), Error);
}

}  // namespace
}  // namespace tandem
