// Experts of GPUs whose rows come from all ranks, in every mode, in one and in several
// micro-batches: their sums, with batches of unequal sizes and none, recorded or not, experts that
// several ranks have, ranks without experts, and that rows travel while others are computed. Ranks
// are threads here, with emulated GPUs.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cmath>
#include <set>
#include <thread>

#include "core/clock.h"
#include "gpu_kernels/emulated/emulator.h"
#include "gpu_kernels/exchange/parcels.h"
#include "tests/gpu_exchanged_ranks.h"
#include "tests/planner_cases.h"

namespace tandem::test {
namespace {

// Whether the pool's device may record the step.
bool may_record(const CudaWays& ways, const std::vector<std::vector<int>>& step, int n_replicas) {
  return can_record(mode_of_step(ways, step, n_replicas));
}

constexpr BackboneGrid kGrids[] = {{2, 1}, {3, 1}, {2, 2}};

// Nothing: other modes for prompts and decode.
class ExchangedExpertsOfGpus : public testing::TestWithParam<std::optional<ExchangeMode>> {};

TEST_P(ExchangedExpertsOfGpus, AddTheSameSumsInMicroBatches) {
  const ModelConfig c = small_config();
  for (const BackboneGrid grid : kGrids)
    for (const int most : {1, 3, int{ExpertPool::kMeasured}}) {
      SCOPED_TRACE(
          fmt::format("{} replicas, tp {}, {} micro-batches", grid.n_replicas, grid.tp, most));
      run_local_ranks({grid.n_ranks()}, [&](Group& group) {
        RankOfGpus gpu(group, c,
                       {.mode = GetParam(),
                        .measures = false,
                        .grid = grid,
                        .max_tokens = kMaxLaneTokens,
                        .micro_batches = most});
        EXPECT_EQ(gpu.pool.micro_batches({}, false), most);
        int n_steps = 0;
        for (const auto& step : kLaneSteps)
          for (const int n : {1, 2, 3, 4})
            for (const bool records : {false, true})
              if ((n == most || most == ExpertPool::kMeasured) &&
                  (!records || may_record(gpu.pool.ways(), step, grid.n_replicas))) {
                expect_sums(gpu, c, grid, group, step, n, records, n_steps++ / 2 % 2);
                group.barrier();
              }
      });
    }
}

// Also those of rows that stay on their GPU.
TEST_P(ExchangedExpertsOfGpus, AddTheSumsOfRowsInFp8) {
  const ModelConfig c = small_config();
  const RowFormats fp8 = row_formats(ExpertRows::kFp8, true);
  for (const BackboneGrid grid : {BackboneGrid{3, 1}, BackboneGrid{2, 2}}) {
    SCOPED_TRACE(fmt::format("{} replicas, tp {}", grid.n_replicas, grid.tp));
    run_local_ranks({grid.n_ranks()}, [&](Group& group) {
      RankOfGpus gpu(group, c,
                     {.mode = GetParam(),
                      .measures = false,
                      .grid = grid,
                      .max_tokens = kMaxLaneTokens,
                      .micro_batches = ExpertPool::kMeasured,
                      .rows = ExpertRows::kFp8},
                     fp8);
      EXPECT_NE(gpu.pool.ways().said().find(", rows in FP8, sums "), std::string::npos);
      int n_steps = 0;
      for (const auto& step : kLaneSteps)
        for (const int n : {1, 3})
          for (const bool records : {false, true})
            if (!records || may_record(gpu.pool.ways(), step, grid.n_replicas)) {
              expect_sums(gpu, c, grid, group, step, n, records, n_steps++ / 2 % 2);
              group.barrier();
            }
    });
  }
}

bool becomes_true(const std::atomic<bool>& flag) {
  const auto start = Clock::now();
  while (!flag && seconds_since(start) < 60) std::this_thread::yield();
  return flag;
}

// Rank 1 sends nothing before the GPU of rank 0 has done what another micro-batch needs.
TEST_P(ExchangedExpertsOfGpus, LetRowsAndSumsTravelWhileOthersAreComputed) {
  const ModelConfig c = small_config();
  const BackboneGrid grid{2, 1};
  const std::vector<int> tokens(8, 1);
  std::atomic<bool> computed_beside_rows = false, computed_beside_sums = false;
  run_local_ranks({2}, [&](Group& group) {
    RankOfGpus gpu(group, c,
                   {.mode = GetParam(),
                    .measures = false,
                    .grid = grid,
                    .max_tokens = kMaxLaneTokens,
                    .micro_batches = 2});
    const ReplicaTokens own(c, tokens, static_cast<unsigned>(group.rank()));
    const TokensOnGpu there(gpu.stream, own);
    gpu.pool.begin_step(std::vector<Batch>(2, own.batch()), 2);
    const bool leads = group.rank() == 0;
    const auto compute = [&](std::atomic<bool>& flag) {
      if (leads)
        gpu.stream.run_on_host([&flag] { flag = true; });
      else
        EXPECT_TRUE(becomes_true(flag));
    };
    if (leads) gpu.pool.submit(there.experts(0, 0, 0, 4));
    compute(computed_beside_rows);
    if (!leads) gpu.pool.submit(there.experts(0, 0, 0, 4));
    gpu.pool.waits(0);
    gpu.pool.submit(there.experts(0, 1, 4, 4));
    gpu.pool.waits(1);
    if (leads) gpu.pool.serve(0);
    compute(computed_beside_sums);
    if (!leads) gpu.pool.serve(0);
    gpu.pool.serve(1);
    for (const int i : {0, 1}) gpu.pool.add_to(i, there.y(4 * i, 4));
    gpu.stream.wait();
    const std::vector<float> want = own.sums();
    expect_close(there.y(), want, 1e-5 * largest(want));
    group.barrier();
  });
}

INSTANTIATE_TEST_SUITE_P(Modes, ExchangedExpertsOfGpus,
                         testing::Values(ExchangeMode::kGather, ExchangeMode::kAllToAll,
                                         ExchangeMode::kLowLatency, std::nullopt),
                         [](const auto& info_of) {
                           std::string name = info_of.param ? name_of(*info_of.param) : "both";
                           std::erase(name, '-');
                           return name;
                         });

// The ranks other than its own that a row goes to, on the average of a batch of `tokens`.
double copies_of_row(const ReplicaTokens& tokens, int n_ranks, int rank) {
  std::set<std::pair<size_t, int>> copies;
  for (size_t i = 0; i < tokens.ids.size(); ++i)
    if (const int to = tokens.ids[i] % n_ranks; to != rank)
      copies.insert({i / tokens.n_active, to});
  return static_cast<double>(copies.size()) / static_cast<double>(tokens.numbers.size());
}

// What the GPUs of three replicas send each other for a layer.
TEST(ExchangedExpertsOfGpusSend, FewerBytesInParcels) {
  const ModelConfig c = small_config();
  const BackboneGrid grid = {3, 1};
  const int n_active = c.router.n_active;
  constexpr int kRows = 20;
  for (const ExpertRows rows : {ExpertRows::kExact, ExpertRows::kFp8})
    for (const ExchangeMode mode : {ExchangeMode::kGather, ExchangeMode::kAllToAll}) {
      const RowFormats formats = row_formats(rows, true);
      const int64_t before = gpu::emulated::counts().sent;
      std::array<double, 3> want = {};
      run_local_ranks({3}, [&](Group& group) {
        RankOfGpus gpu(group, c,
                       {.mode = mode, .grid = grid, .max_tokens = kMaxLaneTokens, .rows = rows},
                       formats);
        const int rank = group.rank();
        const ReplicaTokens own(c, {kRows}, static_cast<unsigned>(rank));
        const TokensOnGpu there(gpu.stream, own);
        gpu.pool.begin_step(std::vector<Batch>(3, own.batch()), 1);
        gpu.pool.submit(there.experts(0, 0, 0, kRows));
        gpu.pool.waits(0);
        gpu.pool.serve(0);
        gpu.pool.add_to(0, there.y(0, kRows));
        gpu.stream.wait();
        const auto bytes_of_parcel = [&](RowFormat format) {
          return gpu::ParcelShape{static_cast<int>(c.dim), n_active, format}.bytes();
        };
        if (mode == ExchangeMode::kGather)
          want[rank] =
              2. * kRows *
              (bytes_of_parcel(rows == ExpertRows::kFp8 ? RowFormat::kFp8 : RowFormat::kF32) +
               4 * c.dim);
        else  // and how many rows go to each rank
          want[rank] = copies_of_row(own, 3, rank) * kRows *
                           (bytes_of_parcel(formats.there) + encoded_bytes(formats.back, c.dim)) +
                       2 * 3 * 4;
        group.barrier();
      });
      EXPECT_EQ(gpu::emulated::counts().sent - before, std::lround(want[0] + want[1] + want[2]));
    }
}

// Bytes that a GPU sends for a row of R1, with experts dealt in turns (docs/gpu_exchange.md).
TEST(ExchangedExpertsOfGpusSend, AsManyBytesForR1AsDocumented) {
  const ModelConfig c = known_model("r1");
  const auto parcel = [&](RowFormat format) {
    return gpu::ParcelShape{static_cast<int>(c.dim), c.router.n_active, format}.bytes();
  };
  EXPECT_EQ(parcel(RowFormat::kF32), 28'736);
  EXPECT_EQ(parcel(RowFormat::kBf16), 14'400);
  EXPECT_EQ(parcel(RowFormat::kFp8), 7'456);
  const int64_t sum = 4 * c.dim, half_sum = 2 * c.dim;
  const ReplicaTokens tokens(c, {400}, 1);
  struct Documented {
    int n_ranks;
    double gather, parcels, gather_fp8, parcels_fp8;  // KB
  };
  for (const auto& [n_ranks, gather, parcels, gather_fp8, parcels_fp8] :
       {Documented{2, 57, 43, 36, 22},
        {4, 172, 117, 108, 59},
        {8, 402, 200, 253, 101},
        {16, 861, 267, 542, 135},
        {32, 1780, 308, 1120, 156}}) {
    double copies = 0;
    for (int rank = 0; rank < n_ranks; ++rank) copies += copies_of_row(tokens, n_ranks, rank);
    copies /= n_ranks;
    const int n_others = n_ranks - 1;
    EXPECT_NEAR(n_others * (parcel(RowFormat::kF32) + sum) * 1e-3, gather, 0.5);
    EXPECT_NEAR(copies * (parcel(RowFormat::kBf16) + sum) * 1e-3, parcels, 1) << n_ranks;
    EXPECT_NEAR(n_others * (parcel(RowFormat::kFp8) + sum) * 1e-3, gather_fp8, 0.5);
    EXPECT_NEAR(copies * (parcel(RowFormat::kFp8) + half_sum) * 1e-3, parcels_fp8, 1) << n_ranks;
  }
}

// What GPUs of one host and of several use if nothing is asked for, by bytes and by times.
TEST(CudaWays, AreChosenAlikeOnAllRanks) {
  const ModelConfig c = small_config();
  const CudaWaysAsked by_bytes = {
      .measures = false, .grid = {2, 1}, .max_tokens = kMaxLaneTokens, .micro_batches = 1};
  std::array<std::vector<std::string>, 2> said;
  run_local_ranks({2}, [&](Group& group) {
    for (const bool sends_parcels : {true, false})
      for (const int n_hosts : {1, 2})
        for (const bool measures : {false, true}) {
          CudaWaysAsked asked = by_bytes;
          asked.sends_parcels = sends_parcels;
          asked.hosts = n_hosts == 1 ? HostLayout::one_host(2) : HostLayout({0, 1});
          asked.measures = measures;
          const RankOfGpus gpu(group, c, asked);
          const CudaWays& ways = gpu.pool.ways();
          EXPECT_NE(ways.of_decode.mode, ExchangeMode::kAllToAll);
          EXPECT_TRUE(n_hosts == 1 || ways.of_decode.mode == ExchangeMode::kGather);
          EXPECT_EQ(ways.decode == nullptr, ways.of_decode.mode == ways.of_prompts.mode);
          said[group.rank()].push_back(ways.said());
          group.barrier();
        }
  });
  EXPECT_EQ(said[0], said[1]);
  EXPECT_EQ(said[0][0], "prompts by all-to-all, decode by low-latency");
  EXPECT_EQ(said[0][2], "prompts by all-to-all, decode by gather");
  for (int i = 4; i < 8; ++i) EXPECT_EQ(said[0][i], "prompts by gather, decode by gather");
}

}  // namespace
}  // namespace tandem::test
