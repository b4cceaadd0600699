// Experts of GPUs whose rows come from all ranks, in every mode, in one and in several
// micro-batches: their sums, with batches of unequal sizes and none, recorded or not, experts that
// several ranks have, ranks without experts, and that rows travel while others are computed. Ranks
// are threads here, with emulated GPUs.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <numeric>
#include <set>
#include <thread>

#include "comm/local_ranks.h"
#include "core/clock.h"
#include "gpu_kernels/emulated/emulator.h"
#include "gpu_kernels/exchange/collectives.h"
#include "gpu_kernels/exchange/exchange.h"
#include "gpu_kernels/exchange/parcels.h"
#include "model/micro_batches.h"
#include "offload/gpu/exchange/cuda_exchanged_experts.h"
#include "tests/check_close.h"
#include "tests/gpu_memory.h"
#include "tests/planner_cases.h"
#include "tests/replica_tokens.h"
#include "tests/small_config.h"

namespace tandem::test {
namespace {

// Every expert on one rank or, in the second layer, on several, where rank 0 has none.
ExpertOwners owners_of_ranks(const ModelConfig& c, int n_ranks) {
  ExpertOwners owners(2, c.router.n_experts);
  for (int e = 0; e < c.router.n_experts; ++e) {
    owners.add(0, e, e % n_ranks);
    for (int rank = 1; rank < n_ranks; ++rank)
      if (e % 3 == 0 || e % (n_ranks - 1) == rank - 1) owners.add(1, e, rank);
  }
  return owners;
}

// Computes the experts that the rank has, in the order of the stream. Only by gather do rows come
// with ids of experts that it does not have.
class EnqueuedExperts final : public ExpertPool {
 public:
  EnqueuedExperts(gpu::Stream& stream, const ExpertOwners& owners, int rank)
      : stream_(stream), owners_(owners), rank_(rank) {}
  void add_to(Ticket ticket, TensorView y) override {
    EXPECT_EQ(ticket, batch_.micro_batch);
    stream_.run_on_host([this, batch = batch_, y] {
      const int64_t rows_of_source = std::max<int64_t>(1, y.rows / owners_.n_ranks());
      for (int64_t t = 0; t < y.rows; ++t)
        for (int64_t k = 0; k < batch.routing.ids.cols; ++k) {
          if (int32_t& e = batch.routing.ids.row<int32_t>(t)[k]; e >= 0 && !has(batch.layer, e)) {
            EXPECT_TRUE(gathers) << "expert " << e;
            e = -1;
          } else if (const auto source = static_cast<int>(t / rows_of_source);
                     gathers && e >= 0 && has(batch.layer, e, source)) {
            EXPECT_EQ(source, rank_) << "the rank that has the row is the nearest";
          }
        }
      add_multiplied(batch, y);
    });
  }

  bool gathers = false;

 private:
  Ticket start(const ExpertBatch& batch) override {
    EXPECT_GT(batch.x.rows, 0);
    batch_ = batch;
    return batch.micro_batch;
  }
  bool has(int layer, int expert) const { return has(layer, expert, rank_); }
  bool has(int layer, int expert, int rank) const {
    return std::ranges::count(owners_.ranks(layer, expert), rank) > 0;
  }
  gpu::Stream& stream_;
  const ExpertOwners& owners_;
  const int rank_;
  ExpertBatch batch_ = {};
};

// A replica's tokens on a GPU.
class TokensOnGpu {
 public:
  TokensOnGpu(gpu::Stream& stream, const ReplicaTokens& tokens)
      : stream_(stream),
        n_(std::ssize(tokens.numbers)),
        dim_(tokens.dim),
        n_active_(tokens.n_active),
        x_(gpu::on_gpu(stream, tokens.x)),
        ids_(gpu::on_gpu(stream, tokens.ids)),
        weights_(gpu::on_gpu(stream, tokens.weights)),
        y_(gpu::on_gpu(stream, std::vector<float>(tokens.x.size(), 1))) {}
  ExpertBatch experts(int layer, int micro_batch, int first, int n) const {
    const TensorView ids{ids_.as<int32_t>(), n_, n_active_, n_active_, DType::kI32};
    const TensorView weights{weights_.as<float>(), n_, n_active_, n_active_};
    return {.layer = layer,
            .x = matrix(x_).rows_from(first, n),
            .routing = {ids.rows_from(first, n), weights.rows_from(first, n)},
            .first_row = first,
            .micro_batch = micro_batch};
  }
  TensorView y(int first, int n) const { return matrix(y_).rows_from(first, n); }
  std::vector<float> y() const { return gpu::from_gpu<float>(stream_, y_); }

 private:
  TensorView matrix(const gpu::Buffer& of) const { return {of.as<float>(), n_, dim_, dim_}; }
  gpu::Stream& stream_;
  const int64_t n_, dim_, n_active_;
  const gpu::Buffer x_, ids_, weights_, y_;
};

// A rank's GPU with its pool. `host` connects the ranks.
struct RankOfGpus {
  RankOfGpus(Group& host, const ModelConfig& c, const CudaWaysAsked& asked,
             RowFormats row_formats = {RowFormat::kBf16, RowFormat::kF32})
      : ranks(connect(host)),
        owners(owners_of_ranks(c, host.size())),
        owners_there(owners, host.rank(), host.size(), stream),
        hosts(CudaHosts::fit(asked.hosts)
                  ? std::make_unique<Hosts>(host, asked.hosts, owners, stream)
                  : nullptr),
        mine(stream, owners, host.rank()),
        formats(row_formats),
        pool({ranks, asked.grid, mine, true, asked.micro_batches},
             choose_cuda_ways(
                 {c, ranks, owners_there, stream, network, formats, hosts ? &hosts->gpus : nullptr},
                 host, asked)) {
    mine.gathers = pool.ways().mode_of_prompts == ExchangeMode::kGather;
  }
  struct Hosts {
    Hosts(Group& all, const HostLayout& layout, const ExpertOwners& owners, gpu::Stream& stream)
        : groups(all, layout),
          within(connect(groups.within())),
          plane(connect(groups.plane())),
          gpus(owners, layout, all.rank(), within, plane, stream) {}
    const HostGroups groups;
    gpu::Collectives within, plane;
    CudaHosts gpus;
  };
  static gpu::Collectives connect(Group& host) {
    gpu::Collectives::Id id = {};
    if (host.rank() == 0) id = gpu::Collectives::make_id();
    host.broadcast(std::as_writable_bytes(std::span(id)), 0);
    return {id, host.rank(), host.size()};
  }
  gpu::Stream stream, network;
  gpu::Collectives ranks;
  const ExpertOwners owners;
  const CudaOwners owners_there;
  const std::unique_ptr<Hosts> hosts;  // null: rows go once to each GPU
  EnqueuedExperts mine;
  const RowFormats formats;
  CudaExchangedExperts pool;
};

// How the rows of a step of these replicas travel.
ExchangeMode mode_of_step(const CudaWays& ways, const std::vector<std::vector<int>>& step,
                          int n_replicas) {
  const bool is_small =
      std::all_of(step.begin(), step.begin() + n_replicas, [](const std::vector<int>& tokens) {
        return std::accumulate(tokens.begin(), tokens.end(), 0) <= CudaWays::kDecodeTokens;
      });
  return is_small && ways.decode ? ways.mode_of_decode : ways.mode_of_prompts;
}

// Whether a step of these replicas has the sums of its tokens, in so many micro-batches.
void expect_sums(RankOfGpus& gpu, const ModelConfig& c, BackboneGrid grid, Group& group,
                 const std::vector<std::vector<int>>& step, int n, bool records, int layer) {
  std::vector<ReplicaTokens> tokens;
  std::vector<Batch> batches;
  for (int r = 0; r < grid.n_replicas; ++r)
    tokens.emplace_back(c, step[r], static_cast<unsigned>(n * 10 + r));
  for (const ReplicaTokens& of : tokens) batches.push_back(of.batch());
  const int rank = group.rank();
  const ReplicaTokens& own = tokens[grid.replica_of(rank)];
  const MicroBatchCuts cuts = micro_batch_cuts(own.batch(), n);
  const TokensOnGpu there(gpu.stream, own);
  const auto size = [&](int i) { return cuts[i + 1] - cuts[i]; };
  gpu.mine.gathers = mode_of_step(gpu.pool.ways(), step, grid.n_replicas) == ExchangeMode::kGather;
  gpu.pool.begin_step(batches, n);
  const auto enqueue = [&] {
    for (int i = 0; i < n; ++i) {
      EXPECT_EQ(gpu.pool.submit(there.experts(layer, i, cuts[i], size(i))), i);
      EXPECT_EQ(gpu.pool.waits(i), n > 1);
    }
    for (int i = 0; i < n; ++i) gpu.pool.serve(i);
    for (int i = 0; i < n; ++i) gpu.pool.add_to(i, there.y(cuts[i], size(i)));
  };
  if (records) {
    const gpu::Graph graph = gpu.stream.capture(enqueue);
    gpu.stream.replay(graph);
    gpu.stream.wait();
  } else {
    enqueue();
    gpu.stream.wait();
  }
  const bool fp8 = gpu.formats.there == RowFormat::kFp8;
  std::vector<float> want = (fp8 ? as_sent(own, RowFormat::kFp8) : own).sums();
  if (grid.tp > 1) {  // the ranks of a replica have a part of its sums each
    const std::vector<float> all = want;
    want.assign(all.size(), 1);
    for (int i = 0; i < n; ++i) {
      const auto [first, count] = grid.tokens_of(rank, size(i));
      const int64_t begin = (cuts[i] + first) * own.dim;
      std::copy_n(all.begin() + begin, count * own.dim, want.begin() + begin);
    }
  }
  const double share = share_of_sums(gpu.mine.gathers ? RowFormat::kF32 : gpu.formats.back);
  if (!want.empty()) expect_close(there.y(), want, share * largest(want));
  group.barrier();  // freeing memory waits for the streams of all ranks of this process
}

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

// Rows cross once to each host, with hosts beside each other and in turns.
TEST(ExchangedExpertsOfHostsOfGpus, AddTheSameSums) {
  const ModelConfig c = small_config();
  struct Case {
    std::vector<int> hosts;
    BackboneGrid grid;
    int most;  // micro-batches
  };
  for (const Case& of :
       {Case{{0, 0, 1, 1}, {4, 1}, 1}, Case{{0, 1, 1, 0}, {4, 1}, 3},
        Case{{0, 0, 1, 1}, {2, 2}, ExpertPool::kMeasured}, Case{{0, 1, 2, 0, 1, 2}, {3, 2}, 2}})
    for (const std::optional<ExchangeMode> mode :
         {std::optional(ExchangeMode::kAllToAll), std::optional<ExchangeMode>()})
      for (const ExpertRows rows : {ExpertRows::kExact, ExpertRows::kFp8}) {
        SCOPED_TRACE(fmt::format("hosts {}, {} replicas, {} micro-batches, {}, {}",
                                 fmt::join(of.hosts, ","), of.grid.n_replicas, of.most,
                                 mode ? name_of(*mode) : "auto", name_of(rows)));
        run_local_ranks({of.grid.n_ranks()}, [&](Group& group) {
          RankOfGpus gpu(group, c,
                         {.mode = mode,
                          .hosts = HostLayout(of.hosts),
                          .measures = false,
                          .grid = of.grid,
                          .max_tokens = kMaxLaneTokens,
                          .micro_batches = of.most,
                          .rows = rows},
                         row_formats(rows, true));
          EXPECT_TRUE(gpu.pool.ways().by_hosts);
          EXPECT_EQ(gpu.pool.ways().said().find("prompts by all-to-all once to each host"), 0u);
          int n_steps = 0;
          for (const auto& step : kLaneSteps) {
            std::vector<std::vector<int>> of_replicas;
            for (int r = 0; r < of.grid.n_replicas; ++r)
              of_replicas.push_back(step[r % step.size()]);
            for (const int n : {1, 2, 3})
              if (n == of.most || of.most == ExpertPool::kMeasured) {
                expect_sums(gpu, c, of.grid, group, of_replicas, n, false, n_steps++ % 2);
                group.barrier();
              }
          }
        });
      }
}

// In a table of hosts each has an expert once, whatever number of its ranks have it; in that of a
// host's ranks others have none.
TEST(CudaHosts, HaveTablesOfTheirOwn) {
  ExpertOwners owners(1, 2);
  for (const int rank : {0, 1, 3, 4}) owners.add(0, 0, rank);
  owners.add(0, 1, 2);
  const HostLayout layout({0, 0, 1, 1, 2, 2});
  run_local_ranks({6}, [&](Group& group) {
    gpu::Stream stream;
    RankOfGpus::Hosts of(group, layout, owners, stream);
    const auto table = [&](const CudaOwners& on_gpu) {
      std::vector<int32_t> all(2 * on_gpu.n_ranks());
      stream.copy(on_gpu.of_layer(0), std::ssize(all) * 4, all.data());
      stream.wait();
      return all;
    };
    EXPECT_EQ(table(of.gpus.hosts()), (std::vector<int32_t>{0, 1, 2, 1, -1, -1}));
    EXPECT_EQ(of.gpus.hosts().rank(), layout.host_of(group.rank()));
    const std::vector<int32_t> of_hosts[] = {{0, 1, -1, -1}, {1, -1, 0, -1}, {0, -1, -1, -1}};
    EXPECT_EQ(table(of.gpus.ranks()), of_hosts[layout.host_of(group.rank())]);
    EXPECT_EQ(of.gpus.ranks().rank(), layout.number_in_host(group.rank()));
    group.barrier();
    if (group.rank() == 0) owners.add(0, 1, 5);
    group.barrier();
    of.gpus.read();
    EXPECT_EQ(table(of.gpus.hosts()), (std::vector<int32_t>{0, 1, 2, 1, 2, -1}));
    group.barrier();
  });
}

// Hosts with unequal numbers of ranks, and single ranks, have no planes.
TEST(CudaHosts, HaveAsManyGpusEach) {
  EXPECT_TRUE(CudaHosts::fit(HostLayout({0, 0, 1, 1})));
  EXPECT_TRUE(CudaHosts::fit(HostLayout({0, 1, 2, 0, 1, 2})));
  EXPECT_FALSE(CudaHosts::fit(HostLayout({0, 0, 0, 1})));
  EXPECT_FALSE(CudaHosts::fit(HostLayout({0, 1})));
  EXPECT_FALSE(CudaHosts::fit(HostLayout::one_host(4)));
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

// Both forms are counted, as auto measures both, with the tables of owners that the second one has:
// between hosts it has the rows of a rank for each, and within a host those of all hosts.
TEST(ExchangedExpertsOfHostsOfGpus, TakeTheMemoryOfBothLevels) {
  const ModelConfig c = small_config();
  const auto counted = [&](const HostLayout& hosts) {
    return cuda_exchange_bytes(ExchangeMode::kAllToAll, c, hosts, 100, ExpertRows::kExact);
  };
  const RowFormats floats = row_formats(ExpertRows::kExact, false);
  const int64_t to_each = cuda_all_to_all_bytes(c, 6, 100, floats);
  EXPECT_EQ(counted(HostLayout::one_host(6)), to_each);
  EXPECT_EQ(counted(HostLayout({0, 0, 0, 0, 1, 1})), to_each);
  const int64_t tables = int64_t{c.n_all_layers()} * c.router.n_experts * (3 + 2) * 4;
  const int64_t by_hosts =
      cuda_all_to_all_bytes(c, 3, 100, floats) + cuda_all_to_all_bytes(c, 2, 300, floats);
  ASSERT_GT(by_hosts, to_each);
  EXPECT_EQ(counted(HostLayout({0, 0, 1, 1, 2, 2})), by_hosts + tables);
}

// What crosses the network between hosts of 8 GPUs for a row of R1 and its sum.
TEST(ExchangedExpertsOfHostsOfGpus, SendAsManyBytesForR1AsDocumented) {
  const ModelConfig c = known_model("r1");
  const ReplicaTokens tokens(c, {400}, 1);
  constexpr int kGpus = 8;
  const auto bytes = [&](ExpertRows rows) {
    const RowFormats formats = row_formats(rows, true);
    const auto dim = static_cast<int>(c.dim);
    return static_cast<double>(gpu::ParcelShape{dim, c.router.n_active, formats.there}.bytes() +
                               encoded_bytes(formats.back, dim));
  };
  struct Documented {
    int n_hosts;
    double to_gpus, to_hosts, to_hosts_fp8;  // KB
  };
  for (const auto& [n_hosts, to_gpus, to_hosts, to_hosts_fp8] :
       {Documented{2, 142, 43, 22}, {4, 238, 117, 59}}) {
    std::set<std::pair<size_t, int>> gpus, hosts;  // of a token of host 0
    for (size_t i = 0; i < tokens.ids.size(); ++i)
      if (const int rank = tokens.ids[i] % (n_hosts * kGpus); rank >= kGpus) {
        gpus.insert({i / tokens.n_active, rank});
        hosts.insert({i / tokens.n_active, rank / kGpus});
      }
    const auto n = static_cast<double>(tokens.numbers.size());
    const double a_gpu = static_cast<double>(gpus.size()) / n,
                 a_host = static_cast<double>(hosts.size()) / n;
    EXPECT_NEAR(a_gpu * bytes(ExpertRows::kExact) * 1e-3, to_gpus, 0.03 * to_gpus) << n_hosts;
    EXPECT_NEAR(a_host * bytes(ExpertRows::kExact) * 1e-3, to_hosts, 0.02 * to_hosts) << n_hosts;
    EXPECT_NEAR(a_host * bytes(ExpertRows::kFp8) * 1e-3, to_hosts_fp8, 0.02 * to_hosts_fp8);
  }
}

// A layer of four replicas on two hosts: what their GPUs send each other, counted.
TEST(ExchangedExpertsOfHostsOfGpus, SendARowOnceToEachHost) {
  const ModelConfig c = small_config();
  const HostLayout hosts({0, 0, 1, 1});
  constexpr int kRows = 40, kRanks = 4;
  const RowFormats formats = row_formats(ExpertRows::kFp8, true);
  const int64_t before = gpu::emulated::counts().sent;
  std::array<int64_t, kRanks> to_hosts = {}, to_gpus = {};  // rows
  run_local_ranks({kRanks}, [&](Group& group) {
    RankOfGpus gpu(group, c,
                   {.mode = ExchangeMode::kAllToAll,
                    .hosts = hosts,
                    .grid = {kRanks, 1},
                    .max_tokens = kMaxLaneTokens},
                   formats);
    const int rank = group.rank();
    const ReplicaTokens own(c, {kRows}, static_cast<unsigned>(rank));
    const TokensOnGpu there(gpu.stream, own);
    gpu.pool.begin_step(std::vector<Batch>(kRanks, own.batch()), 1);
    // From this GPU to the one of its plane on the other host, and from that of each host to its
    // neighbour. Experts are on this host or that of the plane's GPU if they may be.
    const int number = hosts.number_in_host(rank);
    for (const int layer : {0, 1}) {
      gpu.pool.submit(there.experts(layer, 0, 0, kRows));
      gpu.pool.waits(0);
      gpu.pool.serve(0);
      gpu.pool.add_to(0, there.y(0, kRows));
      gpu.stream.wait();
      for (int t = 0; t < kRows; ++t) {
        std::set<int> chosen_hosts, neighbours;
        for (int k = 0; k < c.router.n_active; ++k) {
          const int32_t e = own.ids[t * c.router.n_active + k];
          if (e < 0) continue;
          const std::vector<int32_t>& ranks = gpu.owners.ranks(layer, e);
          const auto has = [&](int r) { return std::ranges::count(ranks, r) > 0; };
          const int here = hosts.host_of(rank);
          const int host = has(2 * here) || has(2 * here + 1) ? here : 1 - here;
          chosen_hosts.insert(host);
          if (!has(2 * host + number)) neighbours.insert(host);
        }
        to_hosts[rank] += chosen_hosts.contains(1 - hosts.host_of(rank));
        to_gpus[rank] += std::ssize(neighbours);
      }
    }
    group.barrier();
  });
  const auto sum = [](const auto& of_ranks) {
    return std::accumulate(of_ranks.begin(), of_ranks.end(), int64_t{0});
  };
  const int64_t parcel =
      gpu::ParcelShape{static_cast<int>(c.dim), c.router.n_active, formats.there}.bytes();
  // Sums are BF16 between hosts and floats within one. In each layer every GPU tells two others how
  // many rows go to each.
  EXPECT_EQ(gpu::emulated::counts().sent - before, sum(to_hosts) * (parcel + 2 * c.dim) +
                                                       sum(to_gpus) * (parcel + 4 * c.dim) +
                                                       2 * kRanks * 2 * 2 * 4);
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
          EXPECT_NE(ways.mode_of_decode, ExchangeMode::kAllToAll);
          EXPECT_TRUE(n_hosts == 1 || ways.mode_of_decode == ExchangeMode::kGather);
          EXPECT_EQ(ways.decode == nullptr, ways.mode_of_decode == ways.mode_of_prompts);
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
