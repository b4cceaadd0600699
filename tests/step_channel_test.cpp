// What ranks of a StepChannel do around steps: they begin together, wait while rank 0 has nothing
// to compute, and end together. Steps are tested in rank_model_test.
#include "engine/step_channel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "comm/agreement.h"
#include "comm/local_ranks.h"

namespace tandem::test {
namespace {

using namespace std::chrono_literals;
constexpr Patience kShort{500ms};
constexpr auto kHeartbeat = 50ms;

void never(const GroupError& error) { ADD_FAILURE() << error.what(); }

TEST(StepChannel, RanksWaitForAStepLongerThanTheirPatience) {
  std::atomic<int> n_ended{0};
  run_local_ranks({.n = 3, .patience = kShort}, [&](Group& group) {
    StepChannel channel(group, never, kHeartbeat);
    if (channel.leads()) {
      channel.begin();
      std::this_thread::sleep_for(3 * kShort.limit);
      channel.end();
    } else {
      channel.follow();
    }
    group.barrier();  // nothing is left of the channel's calls
    ++n_ended;
  });
  EXPECT_EQ(n_ended, 3);
}

TEST(StepChannel, CommandsWithoutStepsEnd) {
  run_local_ranks({.n = 3}, [&](Group& group) {
    StepChannel channel(group, never, kHeartbeat);
    EXPECT_FALSE(channel.has_started());
    channel.leads() ? channel.end() : channel.follow();
    EXPECT_FALSE(channel.leads() && channel.has_started());
    group.barrier();
  });
}

TEST(StepChannel, ARankThatIsLostWhileNothingIsComputedIsNamed) {
  std::atomic<int> lost{-1}, n_errors{0};
  const RankLoss loss{.rank = 2, .call = 8, .stops = true};
  run_local_ranks({.n = 3, .patience = kShort, .loss = loss}, [&](Group& group) {
    std::atomic<bool> is_lost{false};
    const auto on_lost = [&](const GroupError& error) {
      lost = error.lost;
      is_lost = true;
    };
    StepChannel channel(group, on_lost, kHeartbeat);
    try {
      if (!channel.leads()) return channel.follow();
      channel.begin();
      while (!is_lost) std::this_thread::sleep_for(kHeartbeat);
      channel.end();
    } catch (const GroupError& error) {
      EXPECT_EQ(error.lost, 2);
      ++n_errors;
    }
  });
  EXPECT_EQ(lost, 2);
  EXPECT_EQ(n_errors, 2);
}

TEST(StepChannel, ARankThatFailsBeforeTheFirstStepEndsAll) {
  std::atomic<int> n_errors{0};
  run_local_ranks({.n = 3}, [&](Group& group) {
    StepChannel channel(group, never, kHeartbeat);
    try {
      run_on_all(group, [&] {
        if (group.rank() == 1) throw Error("no memory");
        channel.leads() ? channel.begin() : channel.follow();
      });
    } catch (const AgreedError& error) {
      EXPECT_EQ(error.reported_here, group.rank() == 1);
      EXPECT_FALSE(channel.has_started());
      ++n_errors;
    }
  });
  EXPECT_EQ(n_errors, 3);
}

}  // namespace
}  // namespace tandem::test
