// Rows between GPUs of several hosts that cross once to each: their sums, bytes and memory. Ranks
// are threads here, with emulated GPUs.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <set>

#include "comm/agreement.h"
#include "gpu_kernels/emulated/emulator.h"
#include "gpu_kernels/exchange/parcels.h"
#include "gpu_kernels/exchange/peer_windows.h"
#include "tests/error_of.h"
#include "tests/gpu_exchanged_ranks.h"
#include "tests/planner_cases.h"

namespace tandem::test {
namespace {

// Rows cross once to each host, with hosts beside each other and in turns. Decode steps are
// recorded.
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
         {std::optional(ExchangeMode::kAllToAll), std::optional(ExchangeMode::kLowLatency),
          std::optional<ExchangeMode>()})
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
          const CudaWay prompts = {mode.value_or(ExchangeMode::kAllToAll), true},
                        decode = {mode.value_or(ExchangeMode::kLowLatency), true};
          EXPECT_EQ(gpu.pool.ways().of_prompts, prompts);
          EXPECT_EQ(gpu.pool.ways().of_decode, decode);
          EXPECT_EQ(gpu.pool.ways().said().find(fmt::format(
                        "prompts by {} once to each host, decode by {} once to each host",
                        name_of(prompts.mode), name_of(decode.mode))),
                    0u);
          int n_steps = 0;
          for (const auto& step : kLaneSteps) {
            std::vector<std::vector<int>> of_replicas;
            for (int r = 0; r < of.grid.n_replicas; ++r)
              of_replicas.push_back(step[r % step.size()]);
            for (const int n : {1, 2, 3})
              if (n == of.most || of.most == ExpertPool::kMeasured) {
                const bool records =
                    can_record(mode_of_step(gpu.pool.ways(), of_replicas, of.grid.n_replicas));
                expect_sums(gpu, c, of.grid, group, of_replicas, n, records, n_steps++ % 2);
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

// By low latency a host has all rows of the planes of all hosts. Hosts with unequal numbers of GPUs
// decode by gather.
TEST(ExchangedExpertsOfHostsOfGpus, TakeTheMemoryOfGatherAndWindows) {
  const ModelConfig c = small_config();
  const auto counted = [&](const HostLayout& hosts) {
    return cuda_exchange_bytes(ExchangeMode::kLowLatency, c, hosts, 100, ExpertRows::kExact);
  };
  const RowFormats floats = row_formats(ExpertRows::kExact, false);
  EXPECT_EQ(counted(HostLayout::one_host(6)), cuda_low_latency_bytes(c, 6, 100, floats));
  EXPECT_EQ(counted(HostLayout({0, 0, 0, 0, 1, 1})), 0);
  const int64_t tables = int64_t{c.n_all_layers()} * c.router.n_experts * (3 + 2) * 4;
  EXPECT_EQ(
      counted(HostLayout({0, 0, 1, 1, 2, 2})),
      cuda_gather_bytes(c, 3, 100, floats) + cuda_low_latency_bytes(c, 2, 300, floats) + tables);
  // What auto may take: the larger of gather and it, of up to 32 tokens for each of three replicas.
  CudaWaysAsked asked = {.hosts = HostLayout({0, 0, 1, 1, 2, 2}),
                         .grid = {6, 1},
                         .max_tokens = CudaWays::kDecodeTokens};
  const auto of = [&](ExchangeMode mode) {
    return cuda_exchange_bytes(mode, c, asked.hosts, CudaWays::kDecodeTokens, ExpertRows::kExact);
  };
  EXPECT_EQ(cuda_ways_bytes(c, asked),
            std::max(of(ExchangeMode::kAllToAll), of(ExchangeMode::kGather)) +
                std::max(of(ExchangeMode::kLowLatency), of(ExchangeMode::kGather)));
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
    double to_gpus, to_hosts, to_hosts_fp8, decode, decode_fp8;  // KB
  };
  for (const auto& [n_hosts, to_gpus, to_hosts, to_hosts_fp8, decode, decode_fp8] :
       {Documented{2, 142, 43, 22, 43, 36}, {4, 238, 117, 59, 129, 108}}) {
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
    const auto of_decode = [&](RowFormat there) {  // to all other hosts, and floats back
      return (n_hosts - 1) * 1e-3 *
             static_cast<double>(
                 gpu::ParcelShape{static_cast<int>(c.dim), c.router.n_active, there}.bytes() +
                 encoded_bytes(RowFormat::kF32, static_cast<int>(c.dim)));
    };
    EXPECT_NEAR(of_decode(RowFormat::kBf16), decode, 0.02 * decode);
    EXPECT_NEAR(of_decode(RowFormat::kFp8), decode_fp8, 0.02 * decode_fp8);
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

// By low latency a row goes to the GPU of its plane on every other host, whose windows are not
// counted here, and floats come back.
TEST(ExchangedExpertsOfHostsOfGpus, SendARowOfDecodeOnceToEachHost) {
  const ModelConfig c = small_config();
  constexpr int kRows = 5, kRanks = 6, kHosts = 3;
  for (const ExpertRows rows : {ExpertRows::kExact, ExpertRows::kFp8}) {
    const RowFormats formats = row_formats(rows, true);
    const int64_t before = gpu::emulated::counts().sent;
    run_local_ranks({kRanks}, [&](Group& group) {
      RankOfGpus gpu(group, c,
                     {.hosts = HostLayout({0, 1, 2, 0, 1, 2}),
                      .measures = false,
                      .grid = {kRanks, 1},
                      .max_tokens = kMaxLaneTokens},
                     formats);
      const ReplicaTokens own(c, {kRows}, static_cast<unsigned>(group.rank()));
      const TokensOnGpu there(gpu.stream, own);
      gpu.pool.begin_step(std::vector<Batch>(kRanks, own.batch()), 1);
      gpu.pool.submit(there.experts(0, 0, 0, kRows));
      gpu.pool.serve(0);
      gpu.pool.add_to(0, there.y(0, kRows));
      gpu.stream.wait();
      group.barrier();
    });
    const gpu::ParcelShape parcel = {static_cast<int>(c.dim), c.router.n_active, formats.there};
    EXPECT_EQ(gpu::emulated::counts().sent - before,
              kRanks * kRows * (kHosts - 1) * (parcel.bytes() + 4 * c.dim));
  }
}

// The calls of a group of whose ranks one cannot open the window of another rank's GPU. What is
// gathered in pieces of a handle's size are handles.
class GroupWithoutWindow final : public Group {
 public:
  GroupWithoutWindow(Group& group, int without)
      : group_(group), is_without_(group.world_rank(group.rank()) == without), without_(without) {}
  GroupWithoutWindow(std::unique_ptr<Group> owned, int without)
      : GroupWithoutWindow(*owned, without) {
    owned_ = std::move(owned);
  }
  int rank() const override { return group_.rank(); }
  int size() const override { return group_.size(); }
  int world_rank(int rank) const override { return group_.world_rank(rank); }
  void set_patience(Patience patience) override { group_.set_patience(patience); }
  void barrier() override { group_.barrier(); }
  void broadcast(Bytes x, int root) override { group_.broadcast(x, root); }
  void all_gather(ConstBytes mine, Pieces<std::byte> out) override {
    group_.all_gather(mine, out);
    constexpr size_t kHandle = sizeof(gpu::PeerWindows::Handle);
    if (is_without_ && mine.size() == kHandle)  // the handle of the first rank of the group
      std::ranges::fill(out.all.first(kHandle), std::byte{0});
  }
  void all_to_all(Pieces<const std::byte> in, Pieces<std::byte> out) override {
    group_.all_to_all(in, out);
  }
  std::unique_ptr<Group> split(int color) override {
    std::unique_ptr<Group> part = group_.split(color);
    if (!part) return nullptr;
    return std::make_unique<GroupWithoutWindow>(std::move(part), without_);
  }
  std::unique_ptr<Window> allocate_window(int64_t bytes) override {
    return group_.allocate_window(bytes);
  }
  void wait_for_rank(int rank, const std::function<bool()>& done) override {
    group_.wait_for_rank(rank, done);
  }

 private:
  std::unique_ptr<Group> owned_;
  Group& group_;
  const bool is_without_;
  const int without_;
};

// The last of four GPUs cannot open a window: low latency is refused on all ranks, and that rank
// says why. Auto decodes by gather instead.
TEST(ExchangedExpertsOfHostsOfGpus, OneWithoutAWindowIsSaidOnAllRanks) {
  const ModelConfig c = small_config();
  constexpr int kRanks = 4, kWithout = kRanks - 1;
  const std::string why =
      "the GPU cannot reach that of rank 0: give --ep-dispatch gather or all-to-all";
  for (const auto& [hosts, said] :
       {std::pair{HostLayout::one_host(kRanks), why},
        {HostLayout({0, 0, 1, 1}), "among the GPUs of host 1: " + why}}) {
    SCOPED_TRACE(said);
    std::array<std::string, kRanks> refused, chosen;
    run_local_ranks({kRanks}, [&](Group& all) {
      GroupWithoutWindow group(all, kWithout);
      CudaWaysAsked asked = {.mode = ExchangeMode::kLowLatency,
                             .hosts = hosts,
                             .measures = false,
                             .grid = {kRanks, 1},
                             .max_tokens = kMaxLaneTokens};
      const int rank = all.rank();
      try {
        const RankOfGpus gpu(group, c, asked);
        ADD_FAILURE() << "rank " << rank << " has opened windows";
      } catch (const AgreedError& error) {
        refused[rank] = error.what();
        EXPECT_EQ(error.reported_here, rank == kWithout);
        EXPECT_FALSE(error.while_running);
      }
      all.barrier();
      asked.mode.reset();
      RankOfGpus gpu(group, c, asked);
      EXPECT_EQ(gpu.pool.ways().of_decode, CudaWay{ExchangeMode::kGather});
      chosen[rank] = gpu.pool.ways().said();
      expect_sums(gpu, c, asked.grid, group, {{1, 1}, {1}, {}, {1}}, 1, true, 0);
      all.barrier();
    });
    const std::string others = "another rank reports an error";
    EXPECT_EQ(refused, (std::array{others, others, others, said}));
    for (int rank = 0; rank < kRanks; ++rank)
      EXPECT_TRUE(says(chosen[rank], "decode by gather; not others: " + refused[rank]));
  }
}

}  // namespace
}  // namespace tandem::test
