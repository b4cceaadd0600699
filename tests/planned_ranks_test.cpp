// What the planner takes the ranks of one machine for.
#include "cli/plan/planned_ranks.h"

#include <gtest/gtest.h>

#include <numeric>

#include "core/topology.h"
#include "tests/planner_cases.h"

namespace tandem {
namespace {

// Ranks of one host have the cores that share_of() gives them, and its memory and rates in parts.
TEST(RanksAsHosts, HaveTheCoresOfRanks) {
  struct Case {
    std::vector<int> cores;  // of each NUMA node
    int n;                   // ranks
  };
  for (const Case& c :
       {Case{{8}, 2}, {{8}, 8}, {{4, 4}, 2}, {{4, 4}, 4}, {{4, 4}, 8}, {{2, 2, 2, 2}, 2}}) {
    Machine machine = known_machine("2x6454s-4090");
    Topology topology;
    topology.nodes.clear();
    for (const int cores : c.cores) {
      std::vector<int> cpus(cores);
      std::iota(cpus.begin(), cpus.end(), topology.n_cores());
      topology.nodes.push_back({.cpus = cpus});
    }
    machine.nodes.clear();
    for (const int cores : c.cores)
      machine.nodes.push_back({cores, cores * int64_t{1000}, 1e9 * cores});
    const std::optional<Machine> ranks = ranks_as_hosts(machine, c.n);
    ASSERT_TRUE(ranks);
    EXPECT_EQ(ranks->n_hosts(), c.n);
    EXPECT_EQ(ranks->n_all_gpus(), 0);
    for (int rank = 0; rank < c.n; ++rank) {
      const Topology part = share_of(topology, rank, c.n);
      ASSERT_EQ(std::ssize(ranks->nodes), part.n_nodes());
      for (int node = 0; node < part.n_nodes(); ++node) {
        const int cores = static_cast<int>(std::ssize(part.nodes[node].cpus));
        EXPECT_EQ(ranks->nodes[node].cores, cores);
        EXPECT_EQ(ranks->nodes[node].memory_bytes, 1000 * cores);
        EXPECT_NEAR(ranks->nodes[node].read_bytes_per_second, 1e9 * cores, 1);
      }
    }
    EXPECT_NEAR(ranks->peak.bf16 * c.n, machine.peak.bf16, 1e-6 * machine.peak.bf16);
    EXPECT_GT(ranks->network.bytes_per_second, 0);
    EXPECT_EQ(ranks->cross_read_bytes_per_second > 0, ranks->nodes.size() > 1);
  }
}

TEST(RanksAsHosts, AreRefusedWhereRanksDiffer) {
  Machine machine = known_machine("2x6454s-4090");
  machine.nodes = {{8, 1000, 1e9}};
  EXPECT_FALSE(ranks_as_hosts(machine, 3));
  machine.nodes = {{8, 1000, 1e9}, {8, 1000, 1e9}};
  EXPECT_FALSE(ranks_as_hosts(machine, 3)) << "a rank would have parts of both nodes";
  machine.nodes = {{8, 1000, 1e9}, {4, 1000, 1e9}};
  EXPECT_FALSE(ranks_as_hosts(machine, 2));
  machine.nodes.assign(3, {8, 1000, 1e9});
  EXPECT_FALSE(ranks_as_hosts(machine, 2));
}

// GPUs where there are some, else the CPUs unless GPUs are asked for.
TEST(MachineOfRanks, HasGpusOrCpus) {
  const Machine machine = known_machine("8xh200");
  const auto n_gpus = [&](DeviceChoice device, int n) {
    const std::optional<Machine> ranks = machine_of_ranks(machine, device, n);
    return ranks ? ranks->n_all_gpus() : -1;
  };
  EXPECT_EQ(n_gpus(DeviceChoice::kAuto, 4), 4);
  EXPECT_EQ(n_gpus(DeviceChoice::kCuda, 8), 8);
  EXPECT_EQ(n_gpus(DeviceChoice::kCpu, 4), 0);
  EXPECT_EQ(n_gpus(DeviceChoice::kAuto, 16), -1);
  EXPECT_EQ(n_gpus(DeviceChoice::kCuda, 16), -1);
  Machine none = machine;
  none.gpus.clear();
  EXPECT_TRUE(machine_of_ranks(none, DeviceChoice::kAuto, 4));
  EXPECT_FALSE(machine_of_ranks(none, DeviceChoice::kCuda, 4));
  none.n_unmeasured_gpus = 4;
  EXPECT_FALSE(machine_of_ranks(none, DeviceChoice::kAuto, 4));
  EXPECT_TRUE(machine_of_ranks(none, DeviceChoice::kCpu, 4));
  EXPECT_EQ(machine_of_ranks(known_machine("32xh800"), DeviceChoice::kCuda, 8)->n_hosts(), 1);
}

}  // namespace
}  // namespace tandem
