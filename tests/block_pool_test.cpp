// Memory that is used again: by whom, how much is kept, and blocks that outlive their pool.
#include "core/block_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <thread>

namespace tandem {
namespace {

TEST(BlockPool, UsesBlocksAgainThatAreGivenBack) {
  BlockPool pool(1000, 2);
  BlockPool::Block first = pool.take(), second = pool.take();
  EXPECT_EQ(first.span().size(), 1000u);
  EXPECT_NE(first.span().data(), second.span().data()) << "both are in use";
  const std::byte* const memory = first.span().data();
  first = {};
  EXPECT_TRUE(first.span().empty());
  EXPECT_EQ(pool.take().span().data(), memory);
  BlockPool::Block third = pool.take();
  EXPECT_EQ(third.span().data(), memory) << "the temporary block is back";
  BlockPool::Block moved = std::move(third);
  EXPECT_EQ(moved.span().data(), memory);
  moved = std::move(second);
  EXPECT_NE(moved.span().data(), memory);
  EXPECT_NE(pool.take().span().data(), moved.span().data());
}

TEST(BlockPool, BlocksMayOutliveIt) {
  BlockPool::Block block;
  {
    BlockPool pool(64, 1);
    block = pool.take();
  }
  std::fill(block.span().begin(), block.span().end(), std::byte{1});
  EXPECT_EQ(std::count(block.span().begin(), block.span().end(), std::byte{1}), 64);
}

TEST(BlockPool, ManyThreadsNeverShareABlock) {
  BlockPool pool(256, 3);
  std::vector<std::thread> threads;
  std::atomic<int> n_wrong = 0;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < 2000; ++i) {
        const BlockPool::Block block = pool.take();
        std::fill(block.span().begin(), block.span().end(), std::byte(t));
        std::this_thread::yield();
        n_wrong += std::count(block.span().begin(), block.span().end(), std::byte(t)) != 256;
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(n_wrong, 0);
}

}  // namespace
}  // namespace tandem
