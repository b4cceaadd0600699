// `tandem bench comm --device cuda` on ranks that are threads with emulated GPUs.
#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <nlohmann/json.hpp>
#include <thread>

#include "bench/comm/gpu_calls.h"
#include "comm/local_ranks.h"
#include "io/json.h"
#include "io/machine_json.h"
#include "tests/error_of.h"
#include "tests/small_config.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

// MPI takes no part.
class NoMpi final : public RawCollectives {
 public:
  std::string name() const override { return "none"; }
  void barrier() override { check(false, "no call of MPI"); }
  void broadcast(Bytes, int) override { barrier(); }
  void all_gather(ConstBytes, Bytes) override { barrier(); }
  void all_to_all(Pieces<const std::byte>, Pieces<std::byte>) override { barrier(); }
  void reduce_scatter(std::span<const float>, std::span<float>) override { barrier(); }
  void all_reduce(std::span<const float>, std::span<float>) override { barrier(); }
};

std::string eight_gpus() {
  return read_text_file(TANDEM_SOURCE_DIR "/machines/8xh200.json", 1 << 20);
}

struct Result {
  std::vector<Json> rows;
  std::string machine;  // after
};

// The results of each rank. `machine`: the file before, which rank 0 has.
std::vector<Result> results(const std::vector<int>& hosts, const std::string& machine,
                            const std::vector<int>& tokens = {}) {
  std::vector<Result> all(hosts.size());
  run_local_ranks({static_cast<int>(hosts.size())}, [&](Group& group) {
    NoMpi mpi;
    const BenchRanks ranks{group, mpi};
    BenchInput bench;
    bench.options.bytes = {64, 40'000};
    bench.options.seconds = 1e-4;
    bench.options.out = "m.json";
    bench.options.tokens = tokens;
    bench.options.ranks = &ranks;
    bench.config = small_r1();
    Result& mine = all[group.rank()];
    const std::unique_ptr<GpuCalls> gpus = connect_gpus(group);
    mine.machine = bench_gpu_calls(bench, HostLayout(hosts), *gpus,
                                   group.rank() == 0 ? machine : std::string(),
                                   [&](const Json& row) { mine.rows.push_back(row); });
    group.barrier();
  });
  return all;
}

// The bytes of each operation, in the order of the rows.
std::map<std::string, std::vector<int64_t>> bytes_of(const Result& result) {
  std::map<std::string, std::vector<int64_t>> bytes;
  for (const Json& row : result.rows) bytes[row["operation"]].push_back(row["bytes"]);
  return bytes;
}

TEST(GpuCommBench, EveryCallOfEverySize) {
  const std::vector<Result> all = results({0, 0, 0}, "");
  const auto bytes = bytes_of(all[0]);
  // 3 equal pieces of whole floats; pieces of 1, 2 and 1 units, at least one float
  const std::vector<int64_t> whole = {60, 39'996};
  for (const char* const name : {"broadcast", "all_gather", "reduce_scatter", "all_reduce"})
    EXPECT_EQ(bytes.at(name), whole) << name;
  EXPECT_EQ(bytes.at("all_to_all"), (std::vector<int64_t>{4 * 3 * 4, 4 * 2222 * 4}));
  EXPECT_EQ(bytes.at("within hosts"), (std::vector<int64_t>{2 * 1024, 40'000}));
  EXPECT_EQ(bytes.size(), 6u) << "one host has no network";
  for (const Result& result : all) {
    EXPECT_EQ(result.machine, "");
    EXPECT_EQ(result.rows.size(), 12u);
    for (const Json& row : result.rows) {
      EXPECT_EQ(row["ranks"], 3);
      EXPECT_EQ(row["gpu"], "emulated GPU");
      const double seconds = row["seconds"];
      EXPECT_GT(seconds, 0);
      EXPECT_LT(seconds, 1);
      EXPECT_DOUBLE_EQ(row["bytes_per_second"], row["bytes"].get<double>() / seconds);
      EXPECT_GT(row["enqueued_seconds"].get<double>(), 0);
    }
  }
}

// Experts are dealt in turns to two ranks, and every token here has one on each.
TEST(GpuCommBench, ExchangesOfRows) {
  constexpr int kTokens = 40;
  const ModelConfig c = small_r1();
  const std::vector<Result> all = results({0, 0}, "", {kTokens});
  std::map<std::string, int64_t> bytes;
  for (const Json& row : all[0].rows) {
    if (!row.contains("tokens")) continue;
    EXPECT_EQ(row["tokens"], kTokens);
    EXPECT_GT(row["seconds"].get<double>(), 0);
    bytes[fmt::format("{} {} {}", row["operation"].get<std::string>(),
                      row["there"].get<std::string>(), row["back"].get<std::string>())] =
        row["bytes"];
    EXPECT_TRUE(says(comm_benchmark().text(row),
                     fmt::format("|     40 | {}, {}", row["there"].get<std::string>(),
                                 row["back"].get<std::string>())));
  }
  ASSERT_EQ(bytes.size(), 6u);
  const int64_t lists = 8 * c.router.n_active, dim = c.dim;
  const auto parcel = [&](int64_t row_bytes) { return (row_bytes + lists + 15) / 16 * 16; };
  const int64_t fp8 = parcel(dim + dim / 128 * 4), bf16 = parcel(2 * dim), f32 = parcel(4 * dim);
  EXPECT_EQ(bytes.at("exchange gather fp8 f32"), kTokens * (fp8 + 2 * 4 * dim));
  EXPECT_EQ(bytes.at("exchange gather f32 f32"), kTokens * (f32 + 2 * 4 * dim));
  const int64_t n = bytes.at("exchange all-to-all bf16 f32") / (bf16 + 4 * dim);
  EXPECT_GT(n, kTokens);
  EXPECT_LE(n, 2 * kTokens);
  for (const char* const mode : {"all-to-all", "low-latency"}) {
    EXPECT_EQ(bytes.at(fmt::format("exchange {} bf16 f32", mode)), n * (bf16 + 4 * dim)) << mode;
    EXPECT_EQ(bytes.at(fmt::format("exchange {} fp8 bf16", mode)), n * (fp8 + 2 * dim)) << mode;
  }
}

// Between hosts with as many GPUs each a row crosses once to each host, as in the engine. Here
// every token has experts on all four ranks or on fewer, and on one host or both.
TEST(GpuCommBench, ExchangesOfRowsOnceToEachHost) {
  constexpr int kTokens = 8;
  const ModelConfig c = small_r1();
  const std::vector<Result> all = results({0, 0, 1, 1}, "", {kTokens});
  std::map<std::string, int64_t> bytes;
  for (const Json& row : all[0].rows)
    if (row.contains("tokens") && row["there"] != "fp8") bytes[row["operation"]] = row["bytes"];
  ASSERT_EQ(bytes.size(), 4u);
  const int64_t dim = c.dim, parcel = (2 * dim + 8 * c.router.n_active + 15) / 16 * 16;
  const int64_t row = parcel + 4 * dim;
  const int64_t to_ranks = bytes.at("exchange all-to-all, each rank") / row;
  EXPECT_EQ(bytes.at("exchange all-to-all, each rank"), to_ranks * row);
  const int64_t to_hosts = bytes.at("exchange all-to-all") / row - to_ranks;
  EXPECT_EQ(bytes.at("exchange all-to-all"), (to_hosts + to_ranks) * row);
  EXPECT_GE(to_hosts, kTokens);
  EXPECT_LE(to_hosts, 2 * kTokens);
  EXPECT_GT(to_ranks, to_hosts);
  EXPECT_EQ(bytes.at("exchange low-latency"), kTokens * (parcel + 2 * 4 * dim) + to_ranks * row);
  // Hosts with unequal numbers of GPUs have one level, and no windows in each other's memory.
  bytes.clear();
  const std::vector<Result> uneven = results({0, 0, 1}, "", {kTokens});
  for (const Json& of : uneven[0].rows)
    if (of.contains("tokens")) bytes[of["operation"]] = of["bytes"];
  EXPECT_EQ(bytes.size(), 2u);
}

// The time of a call, not of the calls that are measured together.
TEST(GpuCommBench, SecondsAreThoseOfOneCall) {
  run_local_ranks({1}, [&](Group& group) {
    const auto wait = [] { std::this_thread::sleep_for(std::chrono::milliseconds(2)); };
    const ComparedSeconds of_four = compare(group, {wait, wait, 4}, 1e-3),
                          of_one = compare(group, {wait, wait}, 1e-3);
    EXPECT_LT(of_four.own, of_one.own / 2);
    EXPECT_LT(of_four.raw, of_one.raw / 2);
    EXPECT_GE(of_four.own, 0.5e-3);
  });
}

TEST(GpuCommBench, AMachineGetsItsLinks) {
  const Machine before = machine_from_json(eight_gpus(), "m.json");
  const std::vector<Result> one_host = results({0, 0}, eight_gpus());
  Machine after = machine_from_json(one_host[0].machine, "m.json");
  const auto row = [](const Result& result, const char* operation, int which) {
    std::vector<Json> found;
    for (const Json& r : result.rows)
      if (r["operation"] == operation) found.push_back(r);
    return found.at(which);
  };
  EXPECT_EQ(after.gpu_link.latency_seconds,
            row(one_host[0], "within hosts", 0)["seconds"].get<double>());
  const double large = row(one_host[0], "within hosts", 1)["seconds"];
  EXPECT_GE(after.gpu_link.bytes_per_second * large, 40'000 * (1 - 1e-9));
  EXPECT_LE(after.gpu_link.bytes_per_second * large, 2 * 40'000 * (1 + 1e-9));
  EXPECT_EQ(after.network.bytes_per_second, before.network.bytes_per_second);
  EXPECT_EQ(one_host[1].machine, "") << "rank 0 writes";

  const std::vector<Result> two_hosts = results({0, 0, 1}, eight_gpus());
  after = machine_from_json(two_hosts[0].machine, "m.json");
  EXPECT_EQ(after.network.latency_seconds,
            row(two_hosts[0], "between hosts", 0)["seconds"].get<double>());
  EXPECT_NE(after.gpu_link.bytes_per_second, before.gpu_link.bytes_per_second);
  const auto bytes = bytes_of(two_hosts[0]);
  EXPECT_EQ(bytes.at("within hosts"), (std::vector<int64_t>{1024, 40'000}));
  EXPECT_EQ(bytes.at("between hosts"), (std::vector<int64_t>{2 * 1024, 40'000}));

  const std::vector<Result> apart = results({0, 1}, eight_gpus());
  EXPECT_EQ(bytes_of(apart[0]).count("within hosts"), 0u) << "each host has one GPU";
  after = machine_from_json(apart[0].machine, "m.json");
  EXPECT_EQ(after.gpu_link.bytes_per_second, before.gpu_link.bytes_per_second);
}

TEST(GpuCommBench, HostsOfSeveralKindsAreRefused) {
  const std::string kinds =
      read_text_file(TANDEM_SOURCE_DIR "/machines/8xh20-32x4090.json", 1 << 20);
  EXPECT_TRUE(says(error_of([&] {
                     with_gpu_link(kinds, "m.json", {1, 1});
                   }),
                   "--out m.json: it has hosts of several kinds: write gpu_link into the kind"));
}

TEST(GpuCommBench, RowsAreATable) {
  const Json row = {{"bench", "comm"},
                    {"operation", "all_reduce"},
                    {"device", "cuda"},
                    {"gpu", "G"},
                    {"ranks", 4},
                    {"hosts", 2},
                    {"bytes", 2048},
                    {"seconds", 1e-5},
                    {"bytes_per_second", 2.048e8},
                    {"enqueued_seconds", 2e-5},
                    {"seconds_over_enqueued", 0.5}};
  const Benchmark benchmark = comm_benchmark();
  EXPECT_TRUE(says(benchmark.header(row), "the GPUs of 4 ranks on 2 hosts (G), by NCCL"));
  EXPECT_EQ(
      benchmark.text(row),
      "| all_reduce           |        |             |      2.0 |      10.0 |   0.20 |        20.0 "
      "|    0.50 |\n");
}

TEST(GpuCommBench, RefusesWhatItCannotMeasure) {
  const auto refusal = [](const BenchOptions& o) {
    return error_of([&] { checked_input(comm_benchmark(), o); });
  };
  BenchOptions o{.device = DeviceChoice::kCuda};
  EXPECT_TRUE(says(refusal(o), "--device cuda is about the GPUs of several ranks: give --ranks 2"));
  run_local_ranks({1}, [&](Group& group) {
    NoMpi mpi;
    const BenchRanks ranks{group, mpi};
    o.ranks = &ranks;
    EXPECT_EQ(refusal(o), "no error");
    o.simulated_delay = std::chrono::milliseconds(1);
    EXPECT_TRUE(says(refusal(o), "--device cuda: NCCL's calls are measured as they are"));
    o.simulated_delay = {};
    o.as_network = true;
    o.out = "m.json";
    EXPECT_TRUE(says(refusal(o), "--device cuda: NCCL's calls are measured as they are"));
  });
}

}  // namespace
}  // namespace tandem
