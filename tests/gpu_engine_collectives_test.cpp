// Sums and rows that emulated GPUs exchange, in a recording and without.
#include <gtest/gtest.h>

#include <array>
#include <random>

#include "gpu_kernels/exchange/collectives.h"
#include "tests/gpu_memory.h"
#include "tests/gpu_ranks.h"

namespace tandem::test {
namespace {

// Sums of GPUs, in a recording and without: the order of ranks decides the bits.
TEST(GpuCollectives, AddInTheOrderOfRanks) {
  constexpr int kRanks = 3, kRounds = 5;
  for (const int64_t n : {int64_t{1}, int64_t{8192}, int64_t{20'001}}) {
    std::vector<std::vector<float>> in(kRanks);
    std::mt19937 rng(static_cast<unsigned>(n));
    std::normal_distribution<float> normal;
    for (auto& x : in)
      for (int64_t i = 0; i < n; ++i) x.push_back(normal(rng) * (rng() % 2 ? 1e6f : 1));
    std::vector<float> want = in[0];
    for (int rank = 1; rank < kRanks; ++rank)
      for (int64_t i = 0; i < n; ++i) want[i] += in[rank][i];
    const gpu::Collectives::Id id = gpu::Collectives::make_id();
    on_ranks(kRanks, [&](Group& group) {
      gpu::Stream stream;
      gpu::Collectives ranks(id, group.rank(), kRanks);
      const gpu::Buffer given = gpu::on_gpu(stream, in[group.rank()]);
      gpu::Buffer x = gpu::nans_on_gpu<float>(n);
      const uint64_t before = ranks.progress();
      const auto add = [&] {
        stream.copy(given.as<float>(), given.bytes(), x.as<float>());
        ranks.all_reduce(stream, x.as<float>(), n);
      };
      const gpu::Graph graph = stream.capture(add);
      for (int round = 0; round < kRounds; ++round) {
        round % 2 == 0 ? add() : stream.replay(graph);
        std::vector<float> got(n);
        stream.copy(x.as<float>(), x.bytes(), got.data());
        stream.wait();
        EXPECT_EQ(got, want);
      }
      EXPECT_NE(ranks.progress(), before);
      group.barrier();
    });
  }
}

// What ranks gather, and the sums of their pieces, in a recording and without.
TEST(GpuCollectives, GatherAndScatter) {
  constexpr int kRanks = 3;
  for (const int64_t n : {int64_t{1}, int64_t{8192}, int64_t{20'001}}) {
    std::vector<std::vector<float>> in(kRanks);
    std::mt19937 rng(static_cast<unsigned>(n));
    std::normal_distribution<float> normal;
    for (auto& x : in)
      for (int64_t i = 0; i < kRanks * n; ++i) x.push_back(normal(rng) * (rng() % 2 ? 1e6f : 1));
    std::vector<float> sum = in[0], gathered;
    for (int rank = 0; rank < kRanks; ++rank) {
      for (int64_t i = 0; rank > 0 && i < kRanks * n; ++i) sum[i] += in[rank][i];
      const auto own = in[rank].begin() + rank * n;
      gathered.insert(gathered.end(), own, own + n);
    }
    const gpu::Collectives::Id id = gpu::Collectives::make_id();
    on_ranks(kRanks, [&](Group& group) {
      const int rank = group.rank();
      gpu::Stream stream;
      gpu::Collectives ranks(id, rank, kRanks);
      EXPECT_EQ(ranks.n_ranks(), kRanks);
      const gpu::Buffer given = gpu::on_gpu(stream, in[rank]);
      gpu::Buffer x = gpu::nans_on_gpu<float>(kRanks * n);
      gpu::Buffer y = gpu::nans_on_gpu<float>(kRanks * n);
      const auto exchange = [&] {
        stream.copy(given.as<float>() + rank * n, n * 4, x.as<float>() + rank * n);
        ranks.all_gather(stream, x.as<float>(), n);
        stream.copy(given.as<float>(), given.bytes(), y.as<float>());
        ranks.reduce_scatter(stream, y.as<float>(), n);
      };
      const gpu::Graph graph = stream.capture(exchange);
      for (int round = 0; round < 4; ++round) {
        round % 2 == 0 ? exchange() : stream.replay(graph);
        std::vector<float> got(kRanks * n), sums(kRanks * n);
        stream.copy(x.as<float>(), x.bytes(), got.data());
        stream.copy(y.as<float>(), y.bytes(), sums.data());
        stream.wait();
        EXPECT_EQ(got, gathered);
        for (int64_t i = rank * n; i < (rank + 1) * n; ++i) ASSERT_EQ(sums[i], sum[i]) << i;
      }
      group.barrier();
    });
  }
}

// What each rank sends each other one, of any size, in a recording and without.
TEST(GpuCollectives, SendEachRankItsOwn) {
  constexpr int kRanks = 3;
  std::mt19937 rng(3);
  for (int round = 0; round < 6; ++round) {
    std::array<std::array<int64_t, kRanks>, kRanks> n = {};  // [from, to]
    for (auto& of_rank : n)
      for (int64_t& number : of_rank)
        number = rng() % 3 == 0 ? 0 : static_cast<int64_t>(rng() % (rng() % 2 ? 40 : 30'000));
    if (round == 0) n = {};
    const auto value = [](int from, int to, int64_t i) {
      return static_cast<int32_t>(1'000'000 * from + 100'000 * to + i);
    };
    const gpu::Collectives::Id id = gpu::Collectives::make_id();
    on_ranks(kRanks, [&](Group& group) {
      const int rank = group.rank();
      std::vector<int32_t> sent, want;
      std::vector<int64_t> n_sent, n_received;
      for (int r = 0; r < kRanks; ++r) {
        n_sent.push_back(n[rank][r]);
        n_received.push_back(n[r][rank]);
        for (int64_t i = 0; i < n[rank][r]; ++i) sent.push_back(value(rank, r, i));
        for (int64_t i = 0; i < n[r][rank]; ++i) want.push_back(value(r, rank, i));
      }
      sent.push_back(0);  // memory is never empty
      want.push_back(-1);
      gpu::Stream stream;
      gpu::Collectives ranks(id, rank, kRanks);
      const gpu::Buffer given = gpu::on_gpu(stream, sent);
      const gpu::Buffer got = gpu::nans_on_gpu<int32_t>(std::ssize(want));
      const auto exchange = [&] {
        ranks.all_to_all(stream, {given.as<void>(), n_sent, got.as<void>(), n_received});
      };
      const gpu::Graph graph = stream.capture(exchange);
      const std::vector<int32_t> nothing(want.size(), -1);
      for (int i = 0; i < 3; ++i) {
        i % 2 == 0 ? exchange() : stream.replay(graph);
        EXPECT_EQ(gpu::from_gpu<int32_t>(stream, got), want);
        stream.copy(nothing.data(), got.bytes(), got.as<void>());
        stream.wait();
      }
      group.barrier();
    });
  }
}

}  // namespace
}  // namespace tandem::test
