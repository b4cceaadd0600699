// Experts of ranks whose rows travel in several micro-batches at once: their sums, with batches of
// unequal sizes and none, ranks that are lost, and time that is hidden. Ranks are threads here.
#include "offload/ranks/exchanged_experts.h"

#include <fmt/ranges.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <numeric>
#include <thread>

#include "comm/delayed.h"
#include "comm/local_ranks.h"
#include "core/clock.h"
#include "model/micro_batches.h"
#include "offload/ranks/rank_experts.h"
#include "tests/check_close.h"
#include "tests/replica_tokens.h"
#include "tests/small_config.h"

namespace tandem::test {
namespace {

// Takes `pause` for a batch with rows, in which it sleeps.
class MultiplyingExperts final : public ExpertPool {
 public:
  explicit MultiplyingExperts(std::chrono::microseconds pause) : pause_(pause) {}
  void add_to(Ticket, TensorView y) override {
    std::this_thread::sleep_for(pause_);
    add_multiplied(batch_, y);
  }

 private:
  Ticket start(const ExpertBatch& batch) override {
    batch_ = batch;
    return 0;
  }
  const std::chrono::microseconds pause_;
  ExpertBatch batch_ = {};
};

struct LaneSetting {
  BackboneGrid grid;
  ExchangeMode mode;
  int micro_batches;
  std::chrono::microseconds pause{0}, delay{0};
  Patience patience = {};
  std::optional<RankLoss> loss = {};
  std::vector<int> hosts = {};  // of ranks; empty: one
  RowFormats formats = {};
  std::optional<Patience> while_loading = {};  // of the group, if it is another one
  std::function<void()> when_loaded = [] {};   // on every rank
};

constexpr int kLayers = 3;

ModelConfig config_of_layers() {
  ModelConfig c = small_config();
  c.n_layers = kLayers + 1;
  return c;
}

// What a forward pass calls, for `steps` with the tokens of each replica: micro-batches take turns
// at the same points. between() stands for the backbone of a micro-batch of a layer. Returns the
// seconds of all steps.
double run_lane_steps(
    const LaneSetting& setting, const std::vector<std::vector<std::vector<int>>>& steps,
    const std::function<void()>& between = [] {}) {
  const ModelConfig c = config_of_layers();
  const cpu::KernelTable kernels = cpu::kernels_for(cpu::Isa::kReference);
  const LocalRanks ranks = {setting.grid.n_ranks(),
                            setting.while_loading.value_or(setting.patience), setting.loss};
  double seconds = 0;
  run_local_ranks(ranks, [&](Group& group) {
    const ExpertOwners owners = even_owners(c, group.size());
    MultiplyingExperts mine(setting.pause);
    const auto delayed = make_delayed(group, {.delay = setting.delay});
    Group& used = setting.delay.count() > 0 ? *delayed : group;
    const HostLayout hosts =
        setting.hosts.empty() ? HostLayout::one_host(group.size()) : HostLayout(setting.hosts);
    ExchangedExperts pool({used, hosts, setting.grid, owners, kernels, c, mine, kMaxLaneTokens,
                           setting.formats, setting.mode, setting.micro_batches, setting.patience});
    setting.when_loaded();
    const int replica = setting.grid.replica_of(group.rank()), n = setting.micro_batches;
    EXPECT_EQ(pool.micro_batches({}, false), n);
    const auto start = Clock::now();
    for (size_t step = 0; step < steps.size(); ++step) {
      std::vector<ReplicaTokens> tokens;
      std::vector<Batch> batches;
      for (int r = 0; r < setting.grid.n_replicas; ++r)
        tokens.emplace_back(c, steps[step][r], static_cast<unsigned>(step * 10 + r));
      for (const ReplicaTokens& of : tokens) batches.push_back(of.batch());
      ReplicaTokens& own = tokens[replica];
      const int64_t n_own = std::ssize(own.numbers);
      const MicroBatchCuts cuts = micro_batch_cuts(own.batch(), n);
      std::vector<std::vector<float>> y(kLayers + 1, std::vector<float>(own.x.size(), 1.f));
      const auto add = [&](int i, int layer) {
        const TensorView all = {y[layer].data(), n_own, own.dim, own.dim};
        pool.add_to(i, all.rows_from(cuts[i], cuts[i + 1] - cuts[i]));
      };
      pool.begin_step(batches, n);
      for (int layer = 1; layer <= kLayers; ++layer) {
        for (int i = 0; i < n; ++i) {
          if (layer > 1) add(i, layer - 1);
          between();
          EXPECT_EQ(pool.submit(own.experts(layer, i, cuts[i], cuts[i + 1] - cuts[i])), i);
          EXPECT_EQ(pool.waits(i), n > 1);
        }
        for (int i = 0; i < n; ++i) EXPECT_EQ(pool.serve(i), n > 1);
      }
      for (int i = 0; i < n; ++i) add(i, kLayers);
      EXPECT_GE(pool.seconds_waited(), n == 1 ? kLayers * setting.delay.count() * 1e-6 : 0);
      const auto [there, back] = setting.formats;
      const std::vector<float> want = as_sent(own, there).sums();
      const double share =
          share_of_sums(setting.mode == ExchangeMode::kGather ? RowFormat::kF32 : back);
      for (int layer = 1; layer <= kLayers && n_own > 0; ++layer)
        expect_close(y[layer], want, share * largest(want));
    }
    if (group.rank() == 0) seconds = seconds_since(start);
  });
  return seconds;
}

TEST(ExchangedExperts, AddTheSameSumsInMicroBatches) {
  for (const ExchangeMode mode : kExchangeModes)
    for (const int n_ranks : {2, 3, 4})
      for (const int n : {1, 2, 4}) {
        SCOPED_TRACE(fmt::format("{}, {} ranks, {} micro-batches", name_of(mode), n_ranks, n));
        run_lane_steps({{.n_replicas = n_ranks}, mode, n}, kLaneSteps);
      }
}

// Rows that stay on their rank are rounded as well.
TEST(ExchangedExperts, AddTheSumsOfRowsInFp8) {
  const RowFormats fp8 = row_formats(ExpertRows::kFp8, true);
  for (const ExchangeMode mode : kExchangeModes)
    for (const int n : {1, 3})
      run_lane_steps({.grid = {.n_replicas = 3}, .mode = mode, .micro_batches = n, .formats = fp8},
                     kLaneSteps);
  run_lane_steps({.grid = {.n_replicas = 4},
                  .mode = ExchangeMode::kAllToAll,
                  .micro_batches = 2,
                  .hosts = {0, 0, 1, 1},
                  .formats = fp8},
                 kLaneSteps);
}

// What three ranks send each other for a layer, on hosts of their own.
TEST(ExchangedExperts, SendAsManyBytesAsTheirFormatsHave) {
  const ModelConfig c = config_of_layers();
  const cpu::KernelTable kernels = cpu::kernels_for(cpu::Isa::kReference);
  constexpr int kRanks = 3, kRows = 20;
  const std::vector<int> hosts = {0, 1, 2};
  for (const RowFormats formats :
       {row_formats(ExpertRows::kExact, false), row_formats(ExpertRows::kExact, true),
        row_formats(ExpertRows::kFp8, true)}) {
    std::atomic<int64_t> sent{0}, want{0};
    run_local_ranks({kRanks}, [&](Group& group) {
      const auto counted = make_delayed(group, {.host_of_rank = hosts, .bytes_sent = &sent});
      const ExpertOwners owners = even_owners(c, kRanks);
      MultiplyingExperts mine(std::chrono::microseconds(0));
      ExchangedExperts pool({*counted,
                             HostLayout(hosts),
                             {.n_replicas = kRanks},
                             owners,
                             kernels,
                             c,
                             mine,
                             kMaxLaneTokens,
                             formats,
                             ExchangeMode::kAllToAll});
      EXPECT_EQ(pool.modes(),
                std::string("prompts by all-to-all, decode by all-to-all") +
                    (formats.there == RowFormat::kFp8 ? ", rows in FP8, sums in BF16" : ""));
      ReplicaTokens own(c, {kRows}, static_cast<unsigned>(group.rank()));
      const std::vector<Batch> batches(kRanks, own.batch());
      std::vector<float> y(own.x.size());
      pool.begin_step(batches, 1);
      group.barrier();
      if (group.rank() == 0) sent = 0;
      group.barrier();
      pool.submit(own.experts(1, 0, 0, kRows));
      pool.serve(0);
      pool.add_to(0, {y.data(), kRows, own.dim, own.dim});
      int64_t rows = 0;
      for (int t = 0; t < kRows; ++t)
        for (int r = 0; r < kRanks; ++r)
          rows += r != group.rank() &&
                  std::any_of(&own.ids[t * own.n_active], &own.ids[(t + 1) * own.n_active],
                              [&](int32_t id) { return owners.ranks(1, id)[0] == r; });
      // A row with its lists, in lines of 64 bytes, its sum, and how many rows each rank gets.
      const int64_t parcel =
          (encoded_bytes(formats.there, c.dim) + 8 * own.n_active + 63) / 64 * 64;
      want += rows * (parcel + encoded_bytes(formats.back, c.dim)) + (kRanks - 1) * 8;
      group.barrier();
    });
    EXPECT_EQ(sent, want);
  }
}

TEST(ExchangedExperts, AddTheSameSumsOnSeveralHosts) {
  for (const std::vector<int>& hosts : {std::vector{0, 0, 1, 1}, std::vector{0, 1, 0}})
    for (const int n : {1, 2, 4})
      run_lane_steps({.grid = {.n_replicas = static_cast<int>(hosts.size())},
                      .mode = ExchangeMode::kAllToAll,
                      .micro_batches = n,
                      .hosts = hosts},
                     kLaneSteps);
}

int64_t mapped_bytes() {
  std::ifstream file("/proc/self/statm");
  int64_t pages = 0;
  file >> pages;
  return pages * sysconf(_SC_PAGESIZE);
}

// A mode on ranks of one host, or of these hosts.
struct Way {
  ExchangeMode mode;
  std::vector<int> hosts;
  std::string name() const {
    return fmt::format("{} on hosts {}", name_of(mode), fmt::join(hosts, ","));
  }
};
std::vector<Way> ways(const std::vector<std::vector<int>>& hosts_of_two_levels) {
  std::vector<Way> all;
  for (const ExchangeMode mode : kExchangeModes) all.push_back({mode, {0, 0, 0}});
  for (const std::vector<int>& hosts : hosts_of_two_levels)
    all.push_back({ExchangeMode::kAllToAll, hosts});
  return all;
}

// The bytes that the ranks of `way` map when they are made, as ranks that share memory or as ranks
// that do not.
int64_t mapped_by(const Way& way, bool shares_memory, const ModelConfig& config, int max_tokens) {
  const cpu::KernelTable kernels = cpu::kernels_for(cpu::Isa::kReference);
  const HostLayout hosts(way.hosts);
  const int n_ranks = hosts.n_ranks();
  const ExpertOwners owners = even_owners(config, n_ranks);
  std::vector<int> alone(n_ranks);
  std::iota(alone.begin(), alone.end(), 0);
  int64_t mapped = 0;
  run_local_ranks({n_ranks}, [&](Group& ranks) {
    const auto apart = make_delayed(ranks, {.host_of_rank = alone});
    Group& group = shares_memory ? ranks : *apart;
    MultiplyingExperts mine(std::chrono::microseconds(0));
    group.barrier();
    const int64_t before = mapped_bytes();
    group.barrier();
    const BackboneGrid grid = {.n_replicas = n_ranks};
    const ExchangedExperts experts(
        {group, hosts, grid, owners, kernels, config, mine, max_tokens, RowFormats(), way.mode});
    group.barrier();
    if (group.rank() == 0) mapped = mapped_bytes() - before;
    group.barrier();
  });
  return mapped;
}

// What ranks map when they are made is what bytes_for() says, in pages of 2 MiB; without the parts
// of sums that kGather's group keeps later. Threads of lanes would map memory of their own. Ranks
// of a host exchange rows through windows or, where they share no memory, by calls that take more.
TEST(ExchangedExperts, TakeTheMemoryThatTheySay) {
  if (TANDEM_SANITIZED) GTEST_SKIP() << "sanitizers map memory";
  constexpr int kTokens = 8192, kDecodeTokens = 64;
  ModelConfig config = config_of_layers();
  config.dim = 2048;
  for (const Way& way : ways({{0, 0, 1, 1}, {0, 0, 1, 1, 2, 2}})) {
    SCOPED_TRACE(way.name());
    const HostLayout hosts(way.hosts);
    const int n_ranks = hosts.n_ranks();
    const BackboneGrid grid = {.n_replicas = n_ranks};
    int64_t mapped = mapped_by(way, true, config, kTokens);
    if (hosts.has_two_levels()) mapped = std::max(mapped, mapped_by(way, false, config, kTokens));
    int64_t of_rank = ExchangedExperts::bytes_for(config, grid, hosts, kTokens, way.mode, 1);
    if (way.mode == ExchangeMode::kGather)
      of_rank -= int64_t{n_ranks} * (kTokens + kDecodeTokens) * config.dim * 4;
    EXPECT_NEAR(static_cast<double>(mapped), static_cast<double>(n_ranks * of_rank),
                0.1 * static_cast<double>(n_ranks * of_rank));
  }
}

// A slow network with a delay: rows of prompts go once to each host because of their bytes. A few
// rows would be faster by gather, which adds in another order.
TEST(ExchangedExperts, AddInOneOrderForPromptsAndDecode) {
  ModelConfig config = config_of_layers();
  config.dim = 64;
  const HostLayout hosts({0, 0, 1, 1});
  const cpu::KernelTable kernels = cpu::kernels_for(cpu::Isa::kReference);
  const ExpertOwners owners = even_owners(config, hosts.n_ranks());
  const auto modes_for = [&](int max_tokens) {
    std::string modes;
    run_local_ranks({hosts.n_ranks()}, [&](Group& group) {
      const auto network = make_delayed(group, {.delay = std::chrono::milliseconds(4),
                                                .bytes_per_second = 50e6,
                                                .host_of_rank = hosts.host_of_rank()});
      MultiplyingExperts mine(std::chrono::microseconds(0));
      const BackboneGrid grid = {.n_replicas = hosts.n_ranks()};
      const ExchangedExperts experts({*network, hosts, grid, owners, kernels, config, mine,
                                      max_tokens, RowFormats(), std::nullopt});
      if (group.rank() == 0) modes = experts.modes();
    });
    return modes;
  };
  EXPECT_EQ(modes_for(64), "prompts by gather, decode by gather");
  EXPECT_EQ(modes_for(4096),
            "prompts by all-to-all (once to each host), decode by all-to-all (once to each host)");
}

// Whichever call of which lane it is: all others end and name the rank.
TEST(ExchangedExperts, ALostRankIsNamed) {
  const Patience patience{std::chrono::milliseconds(300)};
  for (const Way& way : ways({{0, 1, 0}, {0, 1, 1}}))
    for (const bool stops : {false, true})
      for (int64_t call = 0; call < 60; call += stops ? 23 : 7) {
        const RankLoss loss{static_cast<int>(call % 3), call, stops};
        SCOPED_TRACE(fmt::format("{}, call {}, {}", way.name(), call, stops));
        const auto begin = Clock::now();
        try {
          run_lane_steps({.grid = {.n_replicas = 3},
                          .mode = way.mode,
                          .micro_batches = 2,
                          .patience = patience,
                          .loss = loss,
                          .hosts = way.hosts},
                         kLaneSteps);
          // Windows need few calls of a group, and none once they are there.
          EXPECT_EQ(way.mode, ExchangeMode::kLowLatency) << "the call is never made";
        } catch (const GroupError& error) {
          EXPECT_EQ(error.lost, loss.rank) << error.what();
        }
        EXPECT_LT(seconds_since(begin), 5.0);
      }
}

// Groups have the patience of loading when lanes are made, and then that of steps.
TEST(ExchangedExperts, ALostRankIsNoticedAfterLoading) {
  for (const std::vector<int>& hosts : {std::vector{0, 0, 0}, std::vector{0, 1, 0}}) {
    std::atomic<int> n_loaded{0};
    const auto begin = Clock::now();
    EXPECT_THROW(run_lane_steps({.grid = {.n_replicas = 3},
                                 .mode = ExchangeMode::kAllToAll,
                                 .micro_batches = 2,
                                 .patience = {std::chrono::milliseconds(300)},
                                 .loss = RankLoss{.rank = 1, .call = 90, .stops = true},
                                 .hosts = hosts,
                                 .while_loading = Patience{std::chrono::minutes(5)},
                                 .when_loaded = [&] { ++n_loaded; }},
                                kLaneSteps),
                 GroupError);
    EXPECT_EQ(n_loaded, 3) << "the call is one of a step";
    EXPECT_LT(seconds_since(begin), 60);
  }
}

double seconds_with(int micro_batches, std::chrono::microseconds delay) {
  const std::vector<std::vector<int>> step(2, std::vector<int>(8, 1));
  const std::chrono::milliseconds pause(8 / micro_batches);
  return run_lane_steps({{.n_replicas = 2}, ExchangeMode::kGather, micro_batches, pause, delay},
                        {step, step, step}, [&] { std::this_thread::sleep_for(pause); });
}

// Both parts of a layer take 8 ms and each of two hops as well; all of it sleeps. Two micro-batches
// take 24 ms a layer for 32 ms, four take 20 ms. A busy machine wakes threads late: the least of
// some runs counts.
TEST(ExchangedExperts, RowsTravelWhileOthersAreComputed) {
  const std::chrono::milliseconds delay(8);
  double one = 1e9, two = 1e9, four = 1e9;
  for (int run = 0; run < 10 && (one < 1.2 * two || one < 1.35 * four); ++run) {
    one = std::min(one, seconds_with(1, delay));
    two = std::min(two, seconds_with(2, delay));
    four = std::min(four, seconds_with(4, delay));
  }
  EXPECT_GT(one / two, 1.2);
  EXPECT_GT(one / four, 1.35);
}

}  // namespace
}  // namespace tandem::test
