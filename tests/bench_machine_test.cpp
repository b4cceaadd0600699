// `tandem bench machine`: what it measures, and that the planner reads its output.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cmath>
#include <csignal>
#include <fstream>

#include "bench/benchmark.h"
#include "bench/machine/machine_report.h"
#include "bench/machine/this_machine.h"
#include "core/machine_info.h"
#include "io/machine_json.h"
#include "tests/error_of.h"
#include "tests/fake_checkpoint.h"
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
