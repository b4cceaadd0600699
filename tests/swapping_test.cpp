// Offloading of sequences to host memory while the GPU is full: when it is faster, how much memory
// it gets, and the scheduler's decisions.
#include "scheduling/swapping.h"

#include <gtest/gtest.h>

#include <array>

#include "tests/simulated_engine.h"

namespace tandem::test {
namespace {

// R1's pages in BF16 over PCIe 4.0, and a prompt speed that is typical with experts on CPUs.
constexpr SwapRates kR1 = {64 * 70272, 25e9, 24e9, 500};

TEST(Swapping, PaysWhereTheLinkIsFasterThanComputing) {
  EXPECT_TRUE(swapping_pays(16, 1000, kR1));  // 6 ms against 2 s
  SwapRates slow = kR1;
  slow.to_host_bytes_per_second = slow.to_gpu_bytes_per_second = 72e6;  // 2 s
  EXPECT_TRUE(swapping_pays(16, 1024, slow));
  slow.to_gpu_bytes_per_second = 65e6;
  EXPECT_FALSE(swapping_pays(16, 1024, slow)) << "both ways count";
  slow.to_gpu_bytes_per_second = 72e6;
  EXPECT_FALSE(swapping_pays(16, 980, slow)) << "a page is copied wholly, its tokens may be few";
  slow.computed_tokens_per_second = 520;
  EXPECT_FALSE(swapping_pays(16, 1024, slow));
  slow.page_bytes = slow.page_bytes * 656 / 1152;  // FP8
  EXPECT_TRUE(swapping_pays(16, 1024, slow));
  EXPECT_FALSE(swapping_pays(16, 1024, {})) << "the rates are unknown";
  for (const bool to_host : {false, true}) {
    SwapRates half_known = kR1;
    (to_host ? half_known.to_host_bytes_per_second : half_known.to_gpu_bytes_per_second) = 0;
    EXPECT_FALSE(swapping_pays(16, 1024, half_known));
    half_known.computed_tokens_per_second = 0;
    EXPECT_FALSE(swapping_pays(16, 1024, half_known));
  }
  EXPECT_FALSE(swapping_pays(2, 192, {1, 1, 1, 48})) << "4 seconds each";
  EXPECT_TRUE(swapping_pays(2, 193, {1, 1, 1, 48}));
}

TEST(Swapping, HostPagesHaveThreeLimits) {
  const HostPagesArgs plenty = {100, 300, 1 << 20, int64_t{1} << 40};
  EXPECT_EQ(host_pages_for(plenty), 200);
  HostPagesArgs a = plenty;
  a.most_pages = 5000;
  EXPECT_EQ(host_pages_for(a), 400);
  a.memory_bytes = 103 << 20;
  EXPECT_EQ(host_pages_for(a), 25);
  a.most_pages = 100;
  EXPECT_EQ(host_pages_for(a), 0);
  a.most_pages = 90;
  EXPECT_EQ(host_pages_for(a), 0) << "the GPU has more than is needed";
}

TEST(Swapping, SpeedIsTheFastestOfStepsThatWereWaitedFor) {
  ComputingSpeed speed;
  EXPECT_EQ(speed.tokens_per_second(), 0);
  speed.add(512, 1e-6, false);  // only enqueued
  EXPECT_EQ(speed.tokens_per_second(), 0);
  speed.add(488, 2, true);
  EXPECT_NEAR(speed.tokens_per_second(), 500, 1);
  speed.add(1, 0.1, true);
  EXPECT_NEAR(speed.tokens_per_second(), 500, 1);
  speed.add(600, 1, true);
  EXPECT_EQ(speed.tokens_per_second(), 600);
  speed.add(5, 0, true);
  EXPECT_EQ(speed.tokens_per_second(), 600) << "a step of no time has no speed";
}

// Two sequences of 60 tokens that grow to 190 each, on four pages: the second is preempted.
Simulation two_that_grow(int n_host_pages, const SwapRates& rates) {
  Simulation s({.n_pages = 4,
                .n_host_pages = n_host_pages,
                .max_tokens = 64,
                .max_running = 4,
                .keeps_pages = false});
  s.scheduler.set_rates(rates);
  s.add(text(60, 1), 130);
  s.add(text(60, 2), 130);
  return s;
}

TEST(Swapping, NoTokenIsComputedTwice) {
  Simulation s = two_that_grow(3, kR1);
  s.run();
  EXPECT_GE(s.scheduler.counts().n_preemptions, 1);
  EXPECT_EQ(s.scheduler.counts().n_swaps_out, s.scheduler.counts().n_preemptions);
  EXPECT_EQ(s.scheduler.counts().n_swaps_in, s.scheduler.counts().n_preemptions);
  EXPECT_EQ(s.n_computed, 2 * 189);
  EXPECT_EQ(s.texts[1], alone(text(60, 1), 130));
  EXPECT_EQ(s.texts[2], alone(text(60, 2), 130));
}

TEST(Swapping, WithoutRoomOrGainTokensAreRecomputed) {
  SwapRates slow = kR1;
  slow.to_host_bytes_per_second = 1e6;
  for (const auto& [n_host_pages, rates] : {std::pair{1, kR1}, {3, slow}, {3, SwapRates()}}) {
    Simulation s = two_that_grow(n_host_pages, rates);
    s.run();
    EXPECT_GE(s.scheduler.counts().n_preemptions, 1);
    EXPECT_EQ(s.scheduler.counts().n_swaps_out, 0);
    EXPECT_GT(s.n_computed, 2 * 189);
    EXPECT_EQ(s.texts[2], alone(text(60, 2), 130));
  }
}

TEST(Swapping, AnAbortedSequenceFreesHostMemory) {
  Simulation s = two_that_grow(3, kR1);
  while (s.scheduler.counts().n_swapped == 0) ASSERT_TRUE(s.step());
  EXPECT_EQ(s.scheduler.counts().n_free_host_pages, 1);
  EXPECT_TRUE(s.scheduler.pages(2).empty());
  s.abort(2);
  EXPECT_EQ(s.scheduler.counts().n_swapped, 0);
  EXPECT_EQ(s.scheduler.counts().n_free_host_pages, 3);
  s.run();
  EXPECT_EQ(s.n_copied_in, 0);
}

// Two sequences with two common pages, on six pages. The younger is preempted with two pages of its
// own, which the older takes.
class SharedBeginning : public testing::Test {
 protected:
  SharedBeginning() {
    for (const int i : {0, 1}) {
      prompts_[i] = text(2 * kPageSize, 1);
      prompts_[i].push_back(i);
      s_.add(prompts_[i], n_new_[i]);
      s_.step();
    }
  }
  void until_it_gives_way(const SwapRates& rates) {
    s_.scheduler.set_rates(rates);
    while (s_.scheduler.counts().n_preemptions == 0 && s_.step()) {
    }
  }
  const std::array<int, 2> n_new_ = {200, 150};
  std::array<std::vector<int32_t>, 2> prompts_;
  Simulation s_{
      Scheduler::Limits{.n_pages = 6, .n_host_pages = 8, .max_tokens = 256, .max_running = 4}};
};

TEST_F(SharedBeginning, StaysOnTheGpu) {
  until_it_gives_way(kR1);
  EXPECT_EQ(s_.n_copied_out, 2);
  s_.run();
  EXPECT_EQ(s_.n_copied_in, 2);
  EXPECT_EQ(s_.scheduler.counts().n_swaps_in, 1);
  EXPECT_EQ(s_.texts[2], alone(prompts_[1], n_new_[1]));
}

TEST_F(SharedBeginning, IsRecomputedWhenItIsLost) {
  until_it_gives_way(kR1);
  EXPECT_EQ(s_.n_copied_out, 2);
  s_.scheduler.forget_pages();
  s_.run();
  EXPECT_EQ(s_.n_copied_in, 0);
  EXPECT_EQ(s_.scheduler.counts().n_swaps_in, 0);
  EXPECT_EQ(s_.texts[2], alone(prompts_[1], n_new_[1]));
}

TEST_F(SharedBeginning, IsCopiedWhenItCouldNotBeFound) {
  s_.scheduler.forget_pages();
  until_it_gives_way(kR1);
  EXPECT_EQ(s_.n_copied_out, 4);
  s_.run();
  EXPECT_EQ(s_.n_copied_in, 4);
  EXPECT_EQ(s_.texts[2], alone(prompts_[1], n_new_[1]));
}

TEST_F(SharedBeginning, WouldNotBeRecomputed) {
  until_it_gives_way(
      {1, 1, 1, 48});  // two pages take as long as 192 tokens, more than the sequence's own 127
  EXPECT_EQ(s_.scheduler.counts().n_preemptions, 1);
  EXPECT_EQ(s_.scheduler.counts().n_swaps_out, 0);
}

// Pages that return from host memory are found like computed ones.
TEST(Swapping, ReturnedPagesAreInThePrefixCache) {
  Simulation s({.n_pages = 7, .n_host_pages = 8, .max_tokens = 512, .max_running = 4});
  s.scheduler.set_rates(kR1);
  s.add(text(150, 1), 230);  // grows to six pages
  const auto second = s.add(text(150, 2), 100);
  s.run();
  EXPECT_EQ(s.n_copied_out, 3);
  EXPECT_EQ(s.n_copied_in, 2) << "the first page of the second was still there";
  const int64_t before = s.n_computed;
  s.add(text(150, 2), 1);
  s.run();
  EXPECT_EQ(s.n_computed - before, 1);
  EXPECT_EQ(s.texts[second], alone(text(150, 2), 100));
}

}  // namespace
}  // namespace tandem::test
