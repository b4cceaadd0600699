// A thread that makes calls for another thread.
#include "core/background_thread.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>

namespace tandem::test {
namespace {

TEST(BackgroundThread, MakesCallsBesideTheCaller) {
  BackgroundThread thread;
  thread.wait();  // for nothing
  std::atomic<int> n_calls{0};
  std::atomic<bool> may_end{false};
  const std::function<void()> call = [&] {
    EXPECT_NE(std::this_thread::get_id(), std::thread::id());
    while (!may_end) std::this_thread::yield();
    ++n_calls;
  };
  for (int i = 1; i <= 100; ++i) {
    may_end = false;
    thread.start(call);
    EXPECT_EQ(n_calls, i - 1);
    may_end = true;
    thread.wait();
    EXPECT_EQ(n_calls, i);
  }
}

TEST(BackgroundThread, ThrowsWhatACallThrew) {
  BackgroundThread thread;
  const std::function<void()> fails = [] { throw std::runtime_error("no"); }, works = [] {};
  thread.start(fails);
  EXPECT_THROW(thread.wait(), std::runtime_error);
  thread.wait();  // it is thrown once
  thread.start(works);
  thread.wait();
  thread.start(fails);  // without a wait()
}

TEST(BackgroundThread, EndsTheCallUnderWay) {
  std::atomic<bool> ended{false};
  const std::function<void()> call = [&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    ended = true;
  };
  {
    BackgroundThread thread;
    thread.start(call);
  }
  EXPECT_TRUE(ended);
}

}  // namespace
}  // namespace tandem::test
