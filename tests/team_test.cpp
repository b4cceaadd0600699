#include "core/team.h"

#include <gtest/gtest.h>

#include <chrono>

#include "core/check.h"

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

// Jobs follow each other so closely that late workers meet the next job, and now and then all fall
// asleep.
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

// One piece takes long; the others go to whoever is free, so the job lasts as long as that piece.
TEST(Team, ASlowPieceHoldsUpNobodyElse) {
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

TEST(Team, RefusesMoreThreadsThanCores) {
  EXPECT_THROW(Team(n_cores() + 1), Error);
  EXPECT_THROW(Team(-1), Error);
}

}  // namespace
}  // namespace tandem
