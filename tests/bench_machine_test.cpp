// `tandem bench machine`: what it measures, and that the planner reads its output.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cmath>
#include <csignal>
#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "bench/benchmark.h"
#include "bench/machine/machine_report.h"
#include "bench/machine/this_machine.h"
#include "core/machine_info.h"
#include "io/machine_json.h"
#include "tests/error_of.h"
#include "tests/fake_checkpoint.h"
#include "tests/fake_clock.h"
#include "tests/topologies.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;
using test::topology_of;

constexpr int64_t kReadBytes = 8 << 20;
constexpr double kSeconds = 0.002;

// Cached, because a team pins the calling thread and the topology depends on its affinity.
const Topology& this_machine() {
  static const Topology topology = this_topology();
  return topology;
}

TEST(BenchMachine, ReportsEveryLoop) {
  this_machine();
  Team team(0);
  MachineSpeed speed(team, kReadBytes);
  const Json r = machine_report(this_machine(), speed, kSeconds);
  EXPECT_FALSE(r["cpu"].get<std::string>().empty());
  EXPECT_GE(r["numa_nodes"], 1);
  EXPECT_EQ(r["cores"], this_machine().n_cores());
  EXPECT_EQ(r["threads"], team.size());
  for (const char* key : {"one_thread", "all"}) {
    double best = 0;
    for (const Json& loop : r["read_loops"]) best = std::max(best, loop[key].get<double>());
    EXPECT_EQ(r["read_bytes_per_second"][key], best);
    EXPECT_GT(best, 1e8) << key;
  }
  for (const char* type : {"fp32", "bf16", "int8"}) {
    double best = 0;
    for (const Json& i : r["instructions"])
      if (i["type"] == type) best = std::max(best, i["all_cores"].get<double>());
    if (best == 0) {
      EXPECT_TRUE(r["peak_ops_per_second"][type].is_null()) << type;
    } else {
      EXPECT_EQ(r["peak_ops_per_second"][type], best) << type;
    }
  }
  EXPECT_GT(r["peak_ops_per_second"]["fp32"], 1e8);
}

// With a clock of which each reading is a millisecond later, every burst takes that long.
TEST(BenchMachine, RatesAreThoseOfTheBursts) {
  this_machine();
  const FakeClock clock(std::chrono::milliseconds(1), false);
  Team team(1);
  MachineSpeed speed(team, kReadBytes);
  const auto n_loops = std::ssize(speed.read_loops()) + std::ssize(speed.peak_loops());
  // Three rounds of two bursts for each loop, or as many as fill the time.
  for (const auto& [seconds, n_rounds] : {std::pair(1e-3, 3), {0.014, 4}}) {
    FakeClock::restart();
    const Json r = machine_report(topology_of({1}), speed, seconds);
    EXPECT_EQ(FakeClock::n_readings(), 1 + n_rounds * 4 * n_loops + n_rounds - 2);
    for (const Json& loop : r["read_loops"])
      for (const char* key : {"one_thread", "all"})
        EXPECT_DOUBLE_EQ(loop[key].get<double>(), 64 * (1 << 20) / 1e-3) << loop;
    ASSERT_EQ(r["instructions"].size(), speed.peak_loops().size());
    for (size_t i = 0; i < r["instructions"].size(); ++i) {
      const double ops = static_cast<double>(speed.peak_loops()[i].ops_per_round);
      for (const char* key : {"one_core", "all_cores"})
        EXPECT_DOUBLE_EQ(r["instructions"][i][key].get<double>(), 16 * 200 * ops / 1e-3);
    }
    EXPECT_FALSE(r["read_bytes_per_second"].contains("cross"));
    EXPECT_FALSE(r.contains("nodes"));
  }
}

// The loops were timed in their order, five times each: the peaks once per trial, then the reads.
TEST(BenchMachine, TheFastestLoopIsTheOneThatTookLeast) {
  const FakeClock clock(std::chrono::milliseconds(1));
  Team team(1);
  const MachineSpeed speed(team, kReadBytes);
  int64_t reading = 1;
  const auto trials = [&] {
    std::vector<int64_t> steps;
    for (int i = 0; i < 5; ++i, reading += 2) steps.push_back(FakeClock::steps_at(reading));
    std::sort(steps.begin(), steps.end());
    return steps;
  };
  std::vector<double> rates;
  for (const cpu::PeakLoop& loop : speed.peak_loops())
    rates.push_back(static_cast<double>(loop.ops_per_round) / static_cast<double>(trials()[0]));
  size_t best = speed.peak_loops().size();
  for (size_t i = 0; i < rates.size(); ++i)
    if (speed.peak_loops()[i].type == cpu::Arithmetic::kF32 &&
        (best == rates.size() || rates[i] > rates[best]))
      best = i;
  EXPECT_STREQ(speed.best_peak_loop(cpu::Arithmetic::kF32, cpu::Isa::kAmx).instruction,
               speed.peak_loops()[best].instruction);
  size_t best_read = 0;
  int64_t least = 8;
  for (size_t i = 0; i < speed.read_loops().size(); ++i) {
    const int64_t steps = trials()[2];
    if (steps < least) best_read = i;
    least = std::min(least, steps);
  }
  EXPECT_STREQ(speed.best_read_loop().name, speed.read_loops()[best_read].name);
}

// Addresses in the order in which a loop was told to read from them.
struct Readings {
  static void read(const void* from, int64_t bytes) {
    const std::lock_guard lock(mutex);
    EXPECT_EQ(bytes, 1 << 20);
    of_thread[std::this_thread::get_id()].push_back(static_cast<const std::byte*>(from));
    ++n;
  }
  static cpu::ReadLoop loop() {
    of_thread.clear();
    n = 0;
    return {"recorded", cpu::Feature::kBaseline, read};
  }
  static inline std::mutex mutex;
  static inline std::map<std::thread::id, std::vector<const std::byte*>> of_thread;
  static inline int64_t n = 0;
};

// Each thread goes round its own part, a piece of 1 MiB at a time.
TEST(BenchMachine, ReadsAllOfItsMemory) {
  this_machine();
  for (const int64_t n_pieces : {1, 3}) {
    const FakeClock clock(std::chrono::milliseconds(1), false);
    Team team(1);
    MachineSpeed speed(team, n_pieces == 1 ? 1000 : (n_pieces << 20) + 1000);
    const double rate = speed.read_bytes_per_second(Readings::loop(), Threads::kOne, 0.0025);
    EXPECT_DOUBLE_EQ(rate, 64 * (1 << 20) / 1e-3);
    ASSERT_EQ(Readings::n, 3 * 64) << "three bursts of 1 ms";
    const auto& at = Readings::of_thread.begin()->second;
    const std::byte* first = *std::min_element(at.begin(), at.end());
    for (size_t i = 1; i < at.size(); ++i)
      EXPECT_EQ(at[i] - first, ((((at[i - 1] - first) >> 20) + 1) % n_pieces) << 20) << i;
  }
  const FakeClock clock(std::chrono::milliseconds(1), false);
  if (this_machine().n_cores() < 2) return;
  Team team(2);
  MachineSpeed speed(team, 6 << 20);
  const double rate = speed.read_bytes_per_second(Readings::loop(), Threads::kAll);
  EXPECT_DOUBLE_EQ(rate, 2 * 64 * (1 << 20) / 1e-3);
  EXPECT_EQ(Readings::n, 2 * 64);
  std::set<const std::byte*> all;
  size_t n = 0;
  for (const auto& [thread, at] : Readings::of_thread) {
    const std::set<const std::byte*> own(at.begin(), at.end());
    EXPECT_LE(own.size(), 3u);
    n += own.size();
    all.insert(own.begin(), own.end());
  }
  EXPECT_EQ(all.size(), n) << "no piece is read by both";
  EXPECT_EQ(MachineSpeed::enough_bytes(team),
            std::min(int64_t{2} << 30, available_memory_bytes() / 4));
}

TEST(BenchMachine, ANodesCoresShareItsPieces) {
  for (const int64_t bytes : {int64_t{5}, (int64_t{3} << 20) + 5}) {
    double seconds = kSeconds;
    do {  // longer, until the core has had its time
      numa_speed(topology_of({1}), Readings::loop(), bytes, seconds *= 2);
    } while (Readings::n < 7);
    const auto& at = Readings::of_thread.begin()->second;
    for (size_t i = 0; i < at.size(); ++i)
      ASSERT_EQ(at[i] - at[0], bytes == 5 ? 0 : i % 3 << 20) << i;
  }
  numa_speed(topology_of({2}), Readings::loop(), 4 << 20, kSeconds);
  EXPECT_EQ(Readings::of_thread.size(), 2u);
}

TEST(BenchMachine, IsAMachinesDescription) {
  this_machine();
  Team team(0);
  MachineSpeed speed(team, kReadBytes);
  Json r = machine_report(this_machine(), speed, kSeconds);
  r["measured_at"] = 1;
  const Machine m = machine_from_json(r.dump(), "report");
  EXPECT_EQ(m.cores(), r["cores"]);
  EXPECT_EQ(m.memory_bytes(), r["memory_bytes"]);
  EXPECT_GT(m.memory_bytes(), available_memory_bytes() / 2);
  EXPECT_EQ(m.peak.fp32, r["peak_ops_per_second"]["fp32"]);
  EXPECT_TRUE(m.gpus.empty());
}

TEST(BenchMachine, ReadsFromEveryNumaNode) {
  Team team(1);
  MachineSpeed speed(team, kReadBytes);
  for (const Topology& topology : {topology_of({2}), topology_of({1, 3, 2})}) {
    const NumaSpeed numa = numa_speed(topology, speed.best_read_loop(), kReadBytes, kSeconds);
    ASSERT_EQ(std::ssize(numa.nodes), topology.n_nodes());
    for (int i = 0; i < topology.n_nodes(); ++i) {
      EXPECT_EQ(numa.nodes[i].cores, std::ssize(topology.nodes[i].cpus));
      EXPECT_GT(numa.nodes[i].read_bytes_per_second, 0);
    }
    EXPECT_EQ(numa.cross_bytes_per_second > 0, topology.n_nodes() > 1);
    EXPECT_EQ(numa.bound, topology.n_nodes() == 1) << "the cores need not exist";
  }
}

// Nodes whose memory is unknown share the total.
TEST(BenchMachine, ReportsSeveralNodes) {
  Team team(1);
  MachineSpeed speed(team, kReadBytes);
  Json r = machine_report(topology_of({1, 3}), speed, kSeconds);
  EXPECT_EQ(r["cores"], 4);
  EXPECT_EQ(r["numa_nodes"], 2);
  EXPECT_TRUE(says(r["notes"].dump(), "cannot be bound to NUMA nodes"));
  r["measured_at"] = 1;
  const Machine m = machine_from_json(r.dump(), "report");
  ASSERT_EQ(m.nodes.size(), 2u);
  EXPECT_EQ(m.nodes[1].cores, 3);
  EXPECT_GT(m.cross_read_bytes_per_second, 0);
}

TEST(BenchMachine, ReadsTheDisk) {
  const TempDirectory dir;
  const DiskSpeed own = speed_of_folder(dir.file("new/folder"), 1 << 20, 2, kSeconds);
  EXPECT_FALSE(own.what.empty());
  EXPECT_TRUE(std::filesystem::is_empty(dir.file("new/folder"))) << "nothing is left";
  const std::string tiny = TANDEM_SOURCE_DIR "/models/tiny-r1";
  const DiskSpeed model = speed_of_files(tiny, 2, kSeconds);
  if (model.bytes_per_second > 0) {
    EXPECT_EQ(model.what, tiny);
    EXPECT_LT(model.bytes_per_second, 1e12);
  } else {
    EXPECT_TRUE(says(model.what, "past the page cache"));
  }
  EXPECT_EQ(speed_of_folder("/proc/no-such", 1 << 20, 1, kSeconds).bytes_per_second, 0);
  EXPECT_TRUE(says(error_of([&] { speed_of_files(dir.file(""), 1, kSeconds); }), "no *.safeten"));
  EXPECT_TRUE(says(error_of([] { speed_of_files("/no/such", 1, kSeconds); }), "/no/such"));
}

// Two threads read pieces of at most 4 MiB in turn. With a clock of which each reading is a
// millisecond later, the sixth and the seventh piece are the last ones of 5.5 ms.
TEST(BenchMachine, TheRateOfADiskIsOfTheBytesThatWereRead) {
  const FakeClock clock(std::chrono::milliseconds(1), false);
  const TempDirectory dir;
  constexpr int64_t kPiece = 4 << 20, kRest = 10'000;
  const DiskSpeed disk = speed_of_folder(dir.file("new"), 2 * kPiece + kRest, 1, 0.0055);
  if (disk.bytes_per_second == 0) GTEST_SKIP() << disk.what;
  EXPECT_DOUBLE_EQ(disk.bytes_per_second, (5 * kPiece + 2 * kRest) / 8e-3);
  EXPECT_EQ(disk.what, "a file of 8 MB, written for that, in " + dir.file("new"));

  // The files of a folder in the order of their names; others are not read.
  const std::filesystem::path folder = dir.file("model");
  std::filesystem::create_directory(folder);
  const auto write = [&](const char* name, int64_t bytes) {
    std::ofstream(folder / name) << std::string(bytes, 'x');
  };
  write("b.safetensors", 3 * 4096);
  write("a.safetensors", 4096);
  write("c.safetensors", 0);
  write("a.json", 5 * 4096);
  const DiskSpeed files = speed_of_files(folder, 1, 0.0055);
  EXPECT_DOUBLE_EQ(files.bytes_per_second, (4 * 4096 + 3 * 3 * 4096) / 8e-3);
  EXPECT_EQ(files.what, folder);
  EXPECT_EQ(speed_of_files(folder / "c.safetensors", 1, 1).bytes_per_second, 0) << "is empty";
}

// A file of the given memory's size is written and read, and the result is kept, with the curves of
// a file of rows.
TEST(BenchMachine, TakesTheMemoryThatItIsGiven) {
  const CacheDirectory cache;
  const TempDirectory& dir = cache.dir();
  rlimit usual;
  getrlimit(RLIMIT_FSIZE, &usual);
  const rlimit limited = {5'000'000, usual.rlim_max};
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  setrlimit(RLIMIT_FSIZE, &limited);
  dir.write("rows.json",
            R"({"bench": "mlp", "config": "r1", "format": "fp8", "tokens": 8, "isa": ")" +
                std::string(cpu::name_of(cpu::best_isa())) + R"(", "unhidden_ratio": 0.5})");
  std::vector<Json> rows;
  std::string warning;
  const auto measured = [&](const BenchOptions& o) {
    machine_benchmark().alone({.options = o}, [&](const Json& row) { rows.push_back(row); });
    return rows.back();
  };
  BenchOptions options = {.seconds = 1e-3, .memory_gb = 0.005, .n_threads = 1};
  options.warn = [&](const std::string& line) { warning = line; };
  options.curves = dir.file("rows.json");
  const Json row = measured(options);
  EXPECT_EQ(warning, "");
  EXPECT_FALSE(says(row["disk"], "cannot be written")) << row["disk"];
  if (row["disk_read_bytes_per_second"].is_number()) {
    EXPECT_EQ(row["disk"], "a file of 5 MB, written for that, in " + dir.path() + "/tandem");
  }
  EXPECT_EQ(row["threads"], 1);
  EXPECT_EQ(row["efficiency"].dump(), R"({"dense":{"fp8":[[8.0,0.5]]}})");
  EXPECT_EQ(saved_this_machine()->curves.size(), 1u);

  options.curves.clear();
  options.disk = dir.file("rows.json");
  setenv("XDG_CACHE_HOME", "/proc/no-such", 1);
  const Json other = measured(options);
  EXPECT_TRUE(says(other["disk"], "rows.json"));
  EXPECT_FALSE(other.contains("efficiency"));
  EXPECT_EQ(warning, "cannot keep the measurement in " + this_machine_path());
  setrlimit(RLIMIT_FSIZE, &usual);
  std::signal(SIGXFSZ, handler);
}

TEST(BenchMachine, FindsGpusByTheirDriver) {
  const FoundGpus two = find_gpus(TANDEM_FAKE_CUDA);
  ASSERT_EQ(two.gpus.size(), 2u);
  EXPECT_EQ(two.gpus[1].name, "Fake GPU 1");
  EXPECT_EQ(two.gpus[1].memory_bytes, int64_t{80} << 30);
  EXPECT_EQ(find_gpus("libno-such-driver.so.7").why_none, "no CUDA driver");
  EXPECT_TRUE(says(find_gpus("libm.so.6").why_none, "is no CUDA driver"));

  this_machine();
  Team team(1);
  MachineSpeed speed(team, kReadBytes);
  Json r = machine_report(this_machine(), speed, kSeconds);
  add_disk_and_gpus(r, {2e9, "a disk"}, two);
  EXPECT_TRUE(says(machine_text(r), "GPU: Fake GPU 1, 85.9 GB"));
  r["measured_at"] = 1;
  const Machine m = machine_from_json(r.dump(), "report");
  EXPECT_EQ(m.disk_read_bytes_per_second, 2e9);
  EXPECT_TRUE(m.gpus.empty());
  EXPECT_EQ(m.n_unmeasured_gpus, 2);
  r.erase("measured_at");
  EXPECT_TRUE(says(error_of([&] { machine_from_json(r.dump(), "m.json"); }), "gpus[0]: "));
}

TEST(BenchMachine, SaysWhatADriverRefuses) {
  const auto why_none = [](const char* failing) {
    setenv("TANDEM_FAKE_CUDA_FAILS", failing, 1);
    const FoundGpus found = find_gpus(TANDEM_FAKE_CUDA);
    unsetenv("TANDEM_FAKE_CUDA_FAILS");
    EXPECT_TRUE(found.gpus.empty()) << failing;
    return found.why_none;
  };
  EXPECT_EQ(why_none("init"), "the CUDA driver finds no GPU (error 100)");
  EXPECT_EQ(why_none("count"), "the CUDA driver finds no GPU (error 0)");
  EXPECT_EQ(why_none("none"), "the CUDA driver finds no GPU (error 0)");
  for (const char* call : {"get", "name", "memory"})
    EXPECT_EQ(why_none(call), "the CUDA driver tells nothing of GPU 1");
}

TEST(BenchMachine, APeakIsOfAnInstructionThatTheKernelsMayUse) {
  Team team(1);
  const MachineSpeed speed(team, kReadBytes);
  for (const cpu::Arithmetic type :
       {cpu::Arithmetic::kF32, cpu::Arithmetic::kBF16, cpu::Arithmetic::kInt8})
    EXPECT_STREQ(speed.best_peak_loop(type, cpu::Isa::kReference).instruction, "mulps + addps xmm");
  if (cpu::best_isa() < cpu::Isa::kAvx2) GTEST_SKIP() << "no AVX2";
  EXPECT_STREQ(speed.best_peak_loop(cpu::Arithmetic::kF32, cpu::Isa::kAvx2).instruction,
               "vfmadd231ps ymm");
  const std::string bf16 =
      speed.best_peak_loop(cpu::Arithmetic::kBF16, cpu::Isa::kAvx2).instruction;
  EXPECT_EQ(bf16, "vfmadd231ps ymm") << "AVX2 multiplies no BF16";
}

}  // namespace
}  // namespace tandem
