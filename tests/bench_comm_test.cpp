// `tandem bench comm` on ranks that are threads, beside a second group in place of MPI.
#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <thread>

#include "bench/comm/comm.h"
#include "comm/alone.h"
#include "comm/hosts.h"
#include "comm/local_ranks.h"
#include "io/json.h"
#include "io/machine_json.h"
#include "offload/ranks/row_format.h"
#include "tests/error_of.h"
#include "tests/fake_clock.h"
#include "tests/small_config.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

// MPI's calls as those of a group. `wrong` names a call of which rank 1 gets a wrong result.
class GroupAsMpi final : public RawCollectives {
 public:
  explicit GroupAsMpi(Group& group, std::string wrong = {}) : group_(group), wrong_(wrong) {}
  std::string name() const override { return "a group"; }
  void barrier() override { group_.barrier(); }
  void broadcast(Bytes x, int root) override {
    group_.broadcast(x, root);
    spoil("broadcast", x);
  }
  void all_gather(ConstBytes mine, Bytes out) override {
    group_.all_gather_equal(mine, out);
    spoil("all_gather", out);
    moved.push_back(static_cast<int64_t>(mine.size()));
  }
  void all_to_all(Pieces<const std::byte> in, Pieces<std::byte> out) override {
    group_.all_to_all(in, out);
    spoil("all_to_all", out.all);
    moved.push_back(static_cast<int64_t>(in.all.size()));
    sizes.assign(in.sizes.begin(), in.sizes.end());
  }
  void reduce_scatter(std::span<const float> in, std::span<float> out) override {
    const std::vector<int64_t> pieces(group_.size(), std::ssize(out));
    group_.reduce_scatter({in, pieces}, out);
    spoil("reduce_scatter", std::as_writable_bytes(out));
    moved.push_back(static_cast<int64_t>(in.size_bytes()));
  }
  void all_reduce(std::span<const float> in, std::span<float> out) override {
    std::copy(in.begin(), in.end(), out.begin());
    group_.all_reduce(out);
    spoil("all_reduce", std::as_writable_bytes(out));
  }

  std::vector<int64_t> moved;  // bytes that this rank sent, call by call
  std::vector<int64_t> sizes;  // of the last all_to_all

 private:
  void spoil(const char* call, Bytes x) const {
    if (call == wrong_ && group_.rank() == 1) x.back() ^= std::byte{1};
  }
  Group& group_;
  const std::string wrong_;
};

TEST(BenchComm, ComparesTheTimesOfBothCalls) {
  const FakeClock clock(std::chrono::nanoseconds(1));
  const auto alone = make_alone();
  const auto taking = [](int us) {
    return [us] { FakeClock::advance(std::chrono::microseconds(us)); };
  };
  const ComparedSeconds s = compare(*alone, {taking(300), taking(100)}, 1e-2);
  EXPECT_NEAR(s.own, 300e-6, 1e-8);
  EXPECT_NEAR(s.raw, 100e-6, 1e-8);
  EXPECT_NEAR(s.own_over_raw, 3, 1e-3);
}

TEST(BenchComm, TheSlowestRankCounts) {
  run_local_ranks({3}, [](Group& group) {
    int n_own = 0, n_raw = 0;
    const auto nap = [&] {
      ++n_own;
      if (group.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    };
    const ComparedSeconds s = compare(group, {nap, [&] { ++n_raw; }}, 1e-3);
    EXPECT_GE(s.own, 2e-3);
    EXPECT_GE(s.own, s.raw);
    std::vector<int> all(3);
    group.all_gather_values(n_own, std::span(all));
    EXPECT_EQ(all, std::vector(3, n_own)) << "all ranks make the same calls";
    group.all_gather_values(n_raw, std::span(all));
    EXPECT_EQ(all, std::vector(3, n_raw));
  });
}

TEST(BenchComm, EveryCallHasARow) {
  for (const int n : {1, 2, 3})
    for (const int64_t bytes : {1, 100, 4096})
      run_local_ranks({n}, [&](Group& group) {
        GroupAsMpi mpi(group);
        const BenchRanks ranks{group, mpi};
        std::map<std::string, Json> rows;
        bench_barrier(ranks, 1e-4, [&](const Json& row) { rows["barrier"] = row; });
        bench_collectives(ranks, bytes, 1e-4,
                          [&](const Json& row) { rows[row["operation"]] = row; });
        std::set<std::string> names;
        for (const auto& [name, row] : rows) {
          names.insert(name);
          EXPECT_EQ(row["ranks"], n);
          EXPECT_EQ(row["mpi"], "a group");
          EXPECT_GT(row["seconds"].get<double>(), 0);
          EXPECT_GT(row["raw_seconds"].get<double>(), 0);
          if (name == "barrier") {
            EXPECT_EQ(row["bytes"], 0);
            EXPECT_TRUE(row["bytes_per_second"].is_null());
            continue;
          }
          // Whole floats of each rank, or pieces of one or two units.
          const auto moved = row["bytes"].get<int64_t>();
          EXPECT_LE(std::abs(moved - bytes), std::max<int64_t>(bytes / 2, 4 * n)) << name;
          EXPECT_DOUBLE_EQ(row["bytes_per_second"].get<double>(),
                           static_cast<double>(moved) / row["seconds"].get<double>());
        }
        EXPECT_EQ(names, (std::set<std::string>{"all_gather", "all_reduce", "all_to_all", "barrier",
                                                "broadcast", "reduce_scatter"}));
      });
}

TEST(BenchComm, PiecesOfAllToAllDiffer) {
  run_local_ranks({4}, [](Group& group) {
    GroupAsMpi mpi(group);
    bench_collectives({group, mpi}, 1200, 1e-4, [](const Json&) {});
    EXPECT_EQ(std::set(mpi.sizes.begin(), mpi.sizes.end()), (std::set<int64_t>{200, 400}));
  });
}

TEST(BenchComm, AnotherResultThanMpisIsAnError) {
  for (const char* call : {"broadcast", "all_gather", "all_to_all", "reduce_scatter", "all_reduce"})
    EXPECT_TRUE(says(error_of([&] {
                       run_local_ranks({2, {std::chrono::milliseconds(500)}}, [&](Group& group) {
                         GroupAsMpi mpi(group, call);
                         bench_collectives({group, mpi}, 64, 1e-4, [](const Json&) {});
                       });
                     }),
                     std::string(call) + ": rank 1 gets another result than by a group"))
        << call;
}

// More active experts than a rank has: every row goes to both ranks.
TEST(BenchComm, ExchangesMoveTheBytesThatMpiMoves) {
  constexpr int kTokens = 5;
  BenchInput bench;
  bench.config = small_r1();
  bench.config.router.n_active = bench.config.router.n_experts / 2 + 1;
  bench.options.isa = cpu::best_isa();
  bench.options.seconds = 1e-4;
  const cpu::KernelTable kernels = cpu::kernels_for(cpu::best_isa());
  const auto row_bytes = [&](RowFormat f) {
    return RowCodec(kernels, f, bench.config.dim).bytes();
  };
  const int64_t lists = 8 * bench.config.router.n_active;
  run_local_ranks({2}, [&](Group& group) {
    GroupAsMpi mpi(group);
    const BenchRanks ranks{group, mpi};
    BenchInput own = bench;
    own.options.ranks = &ranks;
    std::vector<Json> rows;
    bench_exchanges(own, HostLayout::one_host(2), kTokens,
                    [&](const Json& row) { rows.push_back(row); });
    const int64_t fp8 = row_bytes(RowFormat::kFp8), bf16 = row_bytes(RowFormat::kBf16),
                  f32 = row_bytes(RowFormat::kF32);
    const struct {
      const char *operation, *there, *back;
      int64_t out, in;
    } expected[] = {{"exchange gather", "fp8", "f32", fp8 + lists, 2 * f32},
                    {"exchange all-to-all", "fp8", "bf16", 2 * (fp8 + lists), 2 * bf16},
                    {"exchange low-latency", "fp8", "bf16", 2 * (fp8 + lists), 2 * bf16},
                    {"exchange gather", "f32", "f32", f32 + lists, 2 * f32},
                    {"exchange all-to-all", "f32", "f32", 2 * (f32 + lists), 2 * f32},
                    {"exchange low-latency", "f32", "f32", 2 * (f32 + lists), 2 * f32}};
    ASSERT_EQ(rows.size(), std::size(expected));
    std::set<std::pair<int64_t, int64_t>> moved;
    for (size_t i = 1; i < mpi.moved.size(); i += 2) moved.emplace(mpi.moved[i - 1], mpi.moved[i]);
    for (size_t i = 0; i < rows.size(); ++i) {
      const auto& e = expected[i];
      EXPECT_EQ(rows[i]["operation"], e.operation);
      EXPECT_EQ(rows[i]["there"], e.there);
      EXPECT_EQ(rows[i]["back"], e.back);
      EXPECT_EQ(rows[i]["tokens"], kTokens);
      EXPECT_EQ(rows[i]["bytes"], kTokens * (e.out + e.in)) << e.operation;
      EXPECT_TRUE(moved.contains({kTokens * e.out, kTokens * e.in})) << e.operation;
    }
  });
}

// Of three ranks the first two are on one host: a row goes once to each host, or to each rank.
TEST(BenchComm, ExchangesBetweenSimulatedHosts) {
  constexpr int kTokens = 5;
  BenchInput bench;
  bench.config = small_r1();
  bench.config.router.n_active = bench.config.router.n_experts;  // every row goes to all ranks
  bench.options.isa = cpu::best_isa();
  bench.options.seconds = 1e-4;
  bench.options.simulated_delay = std::chrono::milliseconds(1);
  std::vector<std::string> warnings;
  run_local_ranks({3}, [&](Group& group) {
    GroupAsMpi mpi(group);
    const BenchRanks ranks{group, mpi};
    BenchInput own = bench;
    own.options.ranks = &ranks;
    own.options.warn = [&](const std::string& line) { warnings.push_back(line); };
    std::vector<Json> rows;
    bench_exchanges(own, HostLayout({0, 0, 1}), kTokens, [&](const Json& row) {
      Json with_hosts = row;
      with_hosts["hosts"] = 2;
      rows.push_back(with_hosts);
    });
    std::vector<std::string> names;
    std::map<std::string, int64_t> bytes;
    for (const Json& row : rows) {
      names.push_back(row["operation"]);
      bytes[row["operation"].get<std::string>() + row["there"].get<std::string>()] =
          row["bytes_between_hosts"];
      EXPECT_GE(row["seconds"].get<double>(), 2e-3) << "rows and sums";
      EXPECT_NE(comm_benchmark().text(row).find(
                    fmt::format("{:.1f} |\n", row["bytes_between_hosts"].get<double>() / 1024)),
                std::string::npos);
      EXPECT_NE(comm_benchmark().header(row).find("3 ranks on 2 hosts"), std::string::npos);
    }
    const std::vector<std::string> of_format = {"exchange gather", "exchange all-to-all",
                                                "exchange all-to-all, each rank"};
    std::vector<std::string> want = of_format;
    want.insert(want.end(), of_format.begin(), of_format.end());
    EXPECT_EQ(names, want);
    // Rows of ranks 0 and 1 cross once, and those of rank 2 once or twice; a number for each pair.
    const int64_t row = 4 * bench.config.dim, lists = bench.config.router.n_active;
    const auto lines = [](int64_t n) { return (n + 63) / 64 * 64; };
    EXPECT_EQ(bytes["exchange all-to-allf32"],
              3 * kTokens * (lines(row + 12 * lists) + row) + 4 * 8);
    EXPECT_EQ(bytes["exchange all-to-all, each rankf32"],
              4 * kTokens * (lines(row + 8 * lists) + row) + 4 * 8);
    EXPECT_EQ(bytes["exchange gatherf32"], 4 * kTokens * (row + 8 * lists + row));
  });
  ASSERT_EQ(warnings.size(), 2u);
  EXPECT_TRUE(says(warnings[0], "low-latency is not measured: the ranks are on several hosts"));
}

TEST(BenchComm, TheNetworkIsBetweenHosts) {
  run_local_ranks({3}, [](Group& group) {
    GroupAsMpi mpi(group);
    const BenchRanks ranks{group, mpi};
    EXPECT_EQ(hosts_of_ranks(group), (std::vector{0, 0, 0}));
    const MeasuredLink m =
        measure_network(ranks.group, calls_of_cpus(ranks), {0, 0, 1}, 20000, 1e-4);
    EXPECT_EQ(m.small_bytes, 2 * 1024);
    EXPECT_EQ(m.large_bytes, 20000);
    const std::vector<int64_t> sizes = {0, 0, 10000}, of_last = {10000, 10000, 0};
    EXPECT_EQ(mpi.sizes, group.rank() < 2 ? sizes : of_last);
    EXPECT_EQ(m.link.latency_seconds, m.small.own);
    // The latency is at most half of the time.
    constexpr double kRounding = 1e-9;
    EXPECT_GE(m.link.bytes_per_second * m.large.own, 20000 * (1 - kRounding));
    EXPECT_LE(m.link.bytes_per_second * m.large.own, 2 * 20000 * (1 + kRounding));
  });
}

// A request of one row over TCP is the shortest of those, and what the machine's file gets. UCX is
// measured where it is installed.
TEST(BenchComm, ARequestToAWorkerBesideTcp) {
  BenchInput bench;
  bench.config = small_r1();
  bench.options.isa = cpu::best_isa();
  bench.options.seconds = 1e-3;
  bench.options.tokens = {64, 1};
  std::vector<Json> rows;
  const double seconds = bench_requests(bench, [&](const Json& row) { rows.push_back(row); });
  ASSERT_TRUE(rows.size() == 4 || rows.size() == 6) << rows.size();
  double least = 1;
  for (const Json& row : rows) {
    const size_t way = (&row - rows.data()) / 2;
    const bool is_open = way == 0;
    const char* const operations[] = {"request to a worker", "encrypted request", "request by UCX"};
    EXPECT_EQ(row["operation"], operations[way]);
    const int n = row["tokens"];
    const int64_t back = int64_t{n} * bench.config.dim * 4;
    EXPECT_GT(row["bytes"], back + back / 2) << "BF16 rows, experts and weights";
    EXPECT_LT(row["bytes"], 2 * back + 64);
    EXPECT_GT(row["raw_seconds"].get<double>(), 1e-7);
    if (is_open) least = std::min(least, row["seconds"].get<double>());
  }
  EXPECT_EQ(seconds, least);
  const std::string file = with_request_seconds(
      read_text_file(TANDEM_SOURCE_DIR "/machines/8xh20-32x4090.json", 1 << 20), "m.json", 3e-5);
  const Machine m = machine_from_json(file, "m.json");
  EXPECT_EQ(m.request_seconds, 3e-5);
  EXPECT_EQ(m.n_hosts(), 33);
  EXPECT_TRUE(says(error_of([] { with_request_seconds("{}", "m.json", 1e-5); }), "m.json"));
  const std::string kinds = with_network(file, "m.json", {5e9, 1e-6}, 3);
  EXPECT_EQ(machine_from_json(kinds, "m.json").between_kinds.bytes_per_second, 5e9);
}

TEST(BenchComm, AMachineFileGetsTheNetwork) {
  const std::string described = R"({"cpu": "x", "isa": "avx2", "sockets": 1, "numa_nodes": 1,
      "cores": 4, "memory_bytes": 64000000000, "sources": {"cpu": "a shop"},
      "read_bytes_per_second": {"one_thread": 1e10, "all": 4e10}, "gpus": [],
      "peak_ops_per_second": {"fp32": 1e12, "bf16": null, "int8": null}})";
  const Link link{3e9, 5e-6};
  const std::string two = with_network(described, "m.json", link, 2);
  const Machine machine = machine_from_json(two, "m.json");
  EXPECT_EQ(machine.hosts, 2);
  EXPECT_EQ(machine.network.bytes_per_second, 3e9);
  EXPECT_EQ(machine.network.latency_seconds, 5e-6);
  EXPECT_EQ(Json::parse(two)["sources"]["cpu"], "a shop");

  const std::string again = with_network(two, "m.json", {4e9, 6e-6}, 3);
  EXPECT_EQ(machine_from_json(again, "m.json").hosts, 2) << "the file says how many";
  EXPECT_EQ(machine_from_json(again, "m.json").network.bytes_per_second, 4e9);
  const std::string one = with_network(described, "m.json", link, 1);
  EXPECT_FALSE(Json::parse(one).contains("hosts"));
  EXPECT_EQ(machine_from_json(one, "m.json").network.latency_seconds, 5e-6);
  EXPECT_TRUE(says(error_of([&] { with_network("{}", "m.json", link, 2); }), "m.json"));
}

// The fields of a row, with steps that wait for a delayed network.
TEST(BenchOverlap, MeasuresStepsInMicroBatches) {
  run_local_ranks({2}, [](Group& group) {
    GroupAsMpi mpi(group);
    StepChannel steps(group, [](const GroupError&) {});
    const BenchRanks ranks{group, mpi, {.group = &group, .steps = &steps}};
    BenchOptions o{.tokens = {1, 12}, .seconds = 1e-3};
    o.ranks = &ranks;
    o.dispatch = ExpertDispatch::kAllToAll;
    o.simulated_delay = std::chrono::duration<double>(1e-3);
    std::vector<Json> rows;
    const Benchmark benchmark = overlap_benchmark();
    run_benchmark(benchmark, checked_input(benchmark, o),
                  [&](const Json& row) { rows.push_back(row); });
    ASSERT_EQ(rows.size(), 4u);
    for (size_t i = 0; i < rows.size(); ++i) {
      EXPECT_EQ(rows[i]["step"], i < 2 ? "decode" : "prompt");
      EXPECT_EQ(rows[i]["tokens"], i % 2 == 0 ? 1 : 12);
      EXPECT_EQ(rows[i]["exchanges"], "prompts by all-to-all, decode by all-to-all");
      EXPECT_GT(rows[i]["seconds_1"].get<double>(), 2 * 3 * 1e-3) << "hops of two layers";
      EXPECT_DOUBLE_EQ(rows[i]["gain_1"].get<double>(), 1);
      EXPECT_GT(rows[i]["seconds_4"].get<double>(), 2 * 3 * 1e-3) << "hops follow each other";
      EXPECT_TRUE(i % 2 == 1 || rows[i]["micro_batches_auto"] == 1) << "one token";
      EXPECT_NE(benchmark.text(rows[i]).find(i % 2 == 0 ? "|      1 |" : "|     12 |"),
                std::string::npos);
    }
    EXPECT_NE(benchmark.header(rows[0]).find("1 ms a hop"), std::string::npos);
  });
}

TEST(BenchOverlap, RowsGoOnceToSimulatedHosts) {
  run_local_ranks({3}, [](Group& group) {
    GroupAsMpi mpi(group);
    StepChannel steps(group, [](const GroupError&) {});
    const BenchRanks ranks{group, mpi, {.group = &group, .steps = &steps}};
    BenchOptions o{.tokens = {2}, .seconds = 1e-3};
    o.ranks = &ranks;
    o.dispatch = ExpertDispatch::kAllToAll;
    o.simulated_rate = 1e9;
    o.simulated_hosts = {2, 1};
    std::vector<Json> rows;
    const Benchmark benchmark = overlap_benchmark();
    run_benchmark(benchmark, checked_input(benchmark, o),
                  [&](const Json& row) { rows.push_back(row); });
    ASSERT_EQ(rows.size(), 2u);
    EXPECT_EQ(
        rows[0]["exchanges"],
        "prompts by all-to-all (once to each host), decode by all-to-all (once to each host)");
  });
}

TEST(BenchComm, NeedsRanks) {
  EXPECT_TRUE(says(error_of([] { checked_input(overlap_benchmark(), {}); }), "--ranks 2"));
  EXPECT_EQ(error_of([] { checked_input(comm_benchmark(), {}); }), "no error") << "requests alone";
  EXPECT_TRUE(says(error_of([] { checked_input(comm_benchmark(), {.bytes = {64}}); }),
                   "--bytes is about several ranks: give --ranks 2"));
  for (const BenchOptions& o :
       {BenchOptions{.simulated_delay = std::chrono::milliseconds(1)},
        BenchOptions{.simulated_rate = 1e9}, BenchOptions{.simulated_hosts = {1}}})
    EXPECT_TRUE(says(error_of([&] { checked_input(comm_benchmark(), o); }),
                     "--simulate-rate are about several ranks: give --ranks 2"));
  run_local_ranks({2}, [](Group& group) {
    GroupAsMpi mpi(group);
    const BenchRanks ranks{group, mpi};
    const auto refused = [&](BenchOptions o) {
      o.ranks = &ranks;
      return error_of([&] { checked_input(comm_benchmark(), std::move(o)); });
    };
    EXPECT_TRUE(says(refused({.bytes = {0}}), "--bytes 0"));
    EXPECT_TRUE(says(refused({.bytes = {int64_t{1} << 40}}), "--bytes 1099511627776"));
    EXPECT_TRUE(says(refused({.as_network = true}), "--as-network"));
    EXPECT_TRUE(says(refused({.simulated_hosts = {2, 1}}), "--simulate-hosts 2,1: there are 2"));
    EXPECT_EQ(refused({.simulated_hosts = {1, 1}}), "no error");
    EXPECT_TRUE(says(refused({.out = "m.json"}), "--out m.json: all ranks are on one host"));
    EXPECT_EQ(refused({.as_network = true, .out = "m.json"}), "no error");
  });
}

}  // namespace
}  // namespace tandem
