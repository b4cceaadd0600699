// CoreTurns on a simulated core that another process also wants. The operating system preempts the
// thread after a time slice, during an item, or the thread yields between two items.
#include "core/core_turns.h"

#include <gtest/gtest.h>

namespace tandem::test {
namespace {

constexpr int64_t kMicrosecond = 1'000, kMillisecond = 1'000'000;

struct Core {
  CoreTurns turns;
  bool is_wanted = true;  // another process wants the core and keeps it for one slice
  int64_t slice = 4 * kMillisecond;
  int64_t now = 0, slice_began = 0, preemptions = 0;
  int64_t items = 0, items_put_aside = 0, yields = 0;

  void run(int64_t item) {
    now += item;
    ++items;
    if (is_wanted && now - slice_began > slice) {  // preempted during this item
      ++preemptions;
      ++items_put_aside;
      slice_began = now += slice;
    }
    if (!turns.item_ended(now, [&] { return preemptions; })) return;
    ++yields;
    now += is_wanted ? slice / 2 : kMicrosecond;
    slice_began = now;
    turns.yielded(now);
  }
  void run_for(int64_t duration, int64_t item) {
    for (const int64_t end = now + duration; now < end;) run(item);
  }
};

TEST(CoreTurns, AnUnsharedCoreIsNeverYielded) {
  Core core;
  core.is_wanted = false;
  for (const int64_t item : {kMicrosecond, 100 * kMicrosecond, 5 * kMillisecond})
    core.run_for(kMillisecond * 1000, item);
  EXPECT_EQ(core.yields, 0);
}

TEST(CoreTurns, ASharedCoreIsYieldedBetweenItems) {
  for (const int64_t slice : {3 * kMillisecond, 4 * kMillisecond, 12 * kMillisecond})
    for (const int64_t item : {3 * kMicrosecond, 15 * kMicrosecond, 300 * kMicrosecond}) {
      Core core;
      core.slice = slice;
      core.run_for(1000 * kMillisecond, item);
      EXPECT_EQ(core.items_put_aside, 1) << slice << " " << item;  // reveals the other process
      EXPECT_GT(core.yields, 80);
    }
}

TEST(CoreTurns, AnItemLongerThanASliceIsPreempted) {
  Core core;
  core.run_for(1000 * kMillisecond, 5 * kMillisecond);
  EXPECT_GT(core.items_put_aside, 50);
  EXPECT_LE(core.yields, core.items);
}

TEST(CoreTurns, TheCoreIsKeptWhenTheOtherProcessEnds) {
  Core core;
  core.run_for(100 * kMillisecond, 15 * kMicrosecond);
  core.is_wanted = false;
  const int64_t before = core.yields;
  core.run_for(1000 * kMillisecond, 15 * kMicrosecond);
  EXPECT_EQ(core.yields, before + 1);
  core.is_wanted = true;
  core.slice_began = core.now;
  core.run_for(1000 * kMillisecond, 15 * kMicrosecond);
  EXPECT_EQ(core.items_put_aside, 2);
  EXPECT_GT(core.yields, before + 100);
}

// A long item or a pause between jobs does not make the thread yield.
TEST(CoreTurns, LongItemsWithoutAPreemptionKeepTheCore) {
  CoreTurns turns;
  int asked = 0;
  const auto preemptions = [&] { return int64_t{0 * ++asked}; };
  for (int64_t now = 0; now < 1000 * kMillisecond; now += 10 * kMillisecond)
    EXPECT_FALSE(turns.item_ended(now, preemptions));
  EXPECT_GT(asked, 90);
  const int before = asked;
  for (int64_t i = 0, now = 1000 * kMillisecond; i < 1000; ++i, now += kMicrosecond)
    EXPECT_FALSE(turns.item_ended(now, preemptions));
  EXPECT_LE(asked, before + 1);  // asking for preemptions costs a system call
}

// An item is long above 500 us, a turn ends after 2 ms, and another process wants the core if a
// yield takes 100 us.
TEST(CoreTurns, TheBoundsAreExact) {
  for (const int64_t more : {0, 1}) {
    CoreTurns turns;
    bool is_asked = false;
    turns.item_ended(500 * kMicrosecond + more, [&] {
      is_asked = true;
      return int64_t{0};
    });
    EXPECT_EQ(is_asked, more == 1);
  }
  const auto preempted_once = [] { return int64_t{1}; };
  for (const int64_t less : {0, 1}) {
    CoreTurns turns;
    int64_t now = kMillisecond;
    EXPECT_FALSE(turns.item_ended(now, preempted_once)) << "the turn begins";
    EXPECT_FALSE(turns.item_ended(now += 2 * kMillisecond, preempted_once));
    EXPECT_TRUE(turns.item_ended(now += 1, preempted_once));
    turns.yielded(now += 100 * kMicrosecond - less);
    EXPECT_FALSE(turns.item_ended(now += 2 * kMillisecond, preempted_once)) << "a new turn";
    EXPECT_EQ(turns.item_ended(now += 1, preempted_once), less == 0);
  }
}

}  // namespace
}  // namespace tandem::test
