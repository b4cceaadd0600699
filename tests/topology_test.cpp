// Nodes, cores and memories as hwloc reports them, and the distribution of threads and columns.
#include "core/topology.h"

#include <gtest/gtest.h>
#include <hwloc.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>

#include "core/memory.h"
#include "tests/error_of.h"
#include "tests/fake_checkpoint.h"
#include "tests/topologies.h"

namespace tandem {
namespace {

using test::topology_of;

std::vector<int> cores(const Topology& topology) {
  std::vector<int> n;
  for (const TopologyNode& node : topology.nodes) n.push_back(static_cast<int>(node.cpus.size()));
  return n;
}

using Ints = std::vector<int>;

// The nodes on which some of the pages are.
Ints nodes_of(const Topology& topology, std::span<std::byte> memory) {
  hwloc_bitmap_t found = hwloc_bitmap_alloc();
  hwloc_get_area_memlocation(topology.system.get(), memory.data(), memory.size(), found,
                             HWLOC_MEMBIND_BYNODESET);
  Ints nodes;
  for (int node = hwloc_bitmap_first(found); node >= 0; node = hwloc_bitmap_next(found, node))
    nodes.push_back(node);
  hwloc_bitmap_free(found);
  return nodes;
}

TEST(Topology, KnowsTheNodesOfSyntheticTopologies) {
  const Topology one = synthetic_topology("numa:1 core:2 pu:2");
  ASSERT_EQ(one.n_nodes(), 1);
  EXPECT_EQ(one.nodes[0].cpus, (Ints{0, 2})) << "a hardware thread of each core";
  const Topology eight = synthetic_topology("pack:2 numa:4 core:3 pu:1");
  ASSERT_EQ(eight.n_nodes(), 8);
  EXPECT_EQ(eight.n_cores(), 24);
  for (int node = 0; node < 8; ++node) {
    EXPECT_EQ(eight.nodes[node].index, node);
    EXPECT_EQ(eight.nodes[node].cpus, (Ints{3 * node, 3 * node + 1, 3 * node + 2}));
    EXPECT_GT(eight.nodes[node].memory_bytes, 0);
  }
  EXPECT_TRUE(one.notes.empty() && eight.notes.empty());
  EXPECT_EQ(error_of([] { synthetic_topology("three cores"); }),
            "\"three cores\" is not a valid synthetic topology of hwloc");
  // Where hwloc knows no cores, each hardware thread is one.
  const Topology threads = synthetic_topology("numa:2 pu:3");
  ASSERT_EQ(threads.n_nodes(), 2);
  EXPECT_EQ(threads.nodes[1].cpus, (Ints{3, 4, 5}));
}

// A small and a large memory are near the same cores.
TEST(Topology, CoresBelongToTheLargestMemoryNearThem) {
  const Topology topology =
      synthetic_topology("[numa(memory=64GB)] [numa(memory=16GB)] pack:2 core:2 pu:1");
  ASSERT_EQ(topology.n_nodes(), 1);
  EXPECT_EQ(topology.n_cores(), 4);
  EXPECT_GT(topology.nodes[0].memory_bytes, int64_t{60} * 1000 * 1000 * 1000);
  ASSERT_EQ(topology.notes.size(), 1u);
  EXPECT_EQ(topology.notes[0],
            "NUMA node 1 has 16.0 GB of memory and no core that this process may use: no experts "
            "are kept there");
  for (const char* memories : {"[numa(memory=1GB)] [numa(memory=16GB)]",
                               "[numa(memory=1GB)] [numa(memory=9GB)] [numa(memory=16GB)]"}) {
    const Topology other = synthetic_topology(std::string(memories) + " pack:2 core:2 pu:1");
    ASSERT_EQ(other.n_nodes(), 1);
    EXPECT_GT(other.nodes[0].memory_bytes, int64_t{15} * 1000 * 1000 * 1000);
    EXPECT_EQ(other.nodes[0].index,
              std::string_view(memories).find("9GB") != std::string::npos ? 2 : 1);
  }
  const Topology alike =
      synthetic_topology("[numa(memory=16GB)] [numa(memory=16GB)] pack:2 core:2 pu:1");
  ASSERT_EQ(alike.n_nodes(), 1);
  EXPECT_EQ(alike.nodes[0].index, 0) << "the first of two";
}

// hwloc reads a description that it exported, in which node 1 has no memory.
TEST(Topology, CoresWithoutMemoryUseThatOfAnotherNode) {
  const Topology three = synthetic_topology("numa:3 core:2 pu:1");
  char* text = nullptr;
  int length = 0;
  ASSERT_EQ(hwloc_topology_export_xmlbuffer(three.system.get(), &text, &length, 0), 0);
  std::string xml(text);
  hwloc_free_xmlbuffer(three.system.get(), text);
  const std::string memory = "local_memory=\"1073741824\"";
  const size_t second = xml.find(memory, xml.find(memory) + 1);
  xml.replace(second, memory.size(), "local_memory=\"0\"");
  const TempDirectory dir;
  dir.write("machine.xml", xml);
  setenv("HWLOC_XMLFILE", dir.file("machine.xml").c_str(), 1);
  const Topology topology = this_topology();
  unsetenv("HWLOC_XMLFILE");
  ASSERT_EQ(topology.n_nodes(), 2);
  EXPECT_EQ(topology.nodes[0].cpus, (Ints{0, 1, 2, 3}));
  EXPECT_EQ(topology.nodes[1].cpus, (Ints{4, 5}));
  EXPECT_EQ(topology.nodes[1].index, 2);
  ASSERT_EQ(topology.notes.size(), 1u);
  EXPECT_EQ(topology.notes[0], "NUMA node 1 has no memory: its cores use that of another node");
  xml.replace(xml.find(memory), memory.size(), "local_memory=\"0\"");
  dir.write("machine.xml", xml);
  setenv("HWLOC_XMLFILE", dir.file("machine.xml").c_str(), 1);
  const Topology only_third = this_topology();
  unsetenv("HWLOC_XMLFILE");
  ASSERT_EQ(only_third.n_nodes(), 1);
  EXPECT_EQ(only_third.nodes[0].index, 2);
  EXPECT_EQ(only_third.nodes[0].cpus, (Ints{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(only_third.notes.size(), 2U);
  EXPECT_EQ(synthetic_topology("numa:2(memory=0) core:2 pu:1").n_cores(), 4);
}

TEST(Topology, ThisMachineIsWhatTheProcessMayUse) {
  const Topology all = this_topology();
  ASSERT_GE(all.n_cores(), 1);
  // As taskset does, including a sanitizer's thread.
  const auto bind = [](const cpu_set_t& cpus) {
    for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task"))
      ASSERT_EQ(sched_setaffinity(std::stoi(thread.path().filename()), sizeof cpus, &cpus), 0);
  };
  cpu_set_t before, one;
  sched_getaffinity(0, sizeof before, &before);
  CPU_ZERO(&one);
  CPU_SET(all.nodes[0].cpus.back(), &one);
  bind(one);
  const Topology bound = this_topology();
  bind(before);
  EXPECT_EQ(bound.n_cores(), 1);
  EXPECT_EQ(bound.nodes[0].cpus, Ints{all.nodes[0].cpus.back()});
  EXPECT_EQ(this_topology().n_cores(), all.n_cores());
}

// Threads that a quota of processor time stops would hold up all others.
TEST(Topology, AQuotaLimitsTheCores) {
  const Topology two = topology_of({4, 4});
  const auto with = [&](double quota) { return cores(within_quota(two, quota)); };
  EXPECT_EQ(with(std::numeric_limits<double>::infinity()), (Ints{4, 4}));
  EXPECT_EQ(with(8), (Ints{4, 4}));
  EXPECT_EQ(with(7.99), (Ints{4, 3}));
  EXPECT_EQ(with(6), (Ints{3, 3}));
  EXPECT_EQ(with(1.9), (Ints{1}));
  EXPECT_EQ(with(0.1), (Ints{1}));
  EXPECT_TRUE(within_quota(two, 8).notes.empty());
  EXPECT_EQ(within_quota(two, 2.5).notes,
            std::vector<std::string>{
                "the control group's quota is the time of 2.5 of 8 cores: 2 are used"});
  EXPECT_EQ(within_quota(two, 0.25).notes,
            std::vector<std::string>{
                "the control group's quota is the time of 0.25 of 8 cores: 1 is used"});
}

TEST(Topology, ThreadsAreSharedInProportion) {
  EXPECT_EQ(cores(with_threads(topology_of({4, 4}), 0)), (Ints{4, 4}));
  EXPECT_EQ(cores(with_threads(topology_of({4, 4}), 8)), (Ints{4, 4}));
  EXPECT_EQ(cores(with_threads(topology_of({4, 4}), 4)), (Ints{2, 2}));
  EXPECT_EQ(cores(with_threads(topology_of({6, 2}), 4)), (Ints{3, 1}));
  EXPECT_EQ(cores(with_threads(topology_of({6, 2}), 1)), (Ints{1})) << "a node without threads";
  EXPECT_EQ(with_threads(topology_of({1, 1, 1}), 1).n_cores(), 1);
  for (const auto& sizes : {topology_of({1, 7, 3}), topology_of({2, 2, 2, 5, 1, 9, 4, 3})})
    for (int n = 1; n <= sizes.n_cores(); ++n) {
      const Topology part = with_threads(sizes, n);
      EXPECT_EQ(part.n_cores(), n);
      for (const TopologyNode& node : part.nodes) {
        EXPECT_FALSE(node.cpus.empty());
        EXPECT_LE(node.cpus.size(), sizes.nodes[node.index].cpus.size());
      }
    }
}

TEST(Topology, ProcessesOfAHostDivideItsCores) {
  const auto cpus = [](const Topology& topology, int index, int n) {
    std::vector<Ints> all;
    for (const TopologyNode& node : share_of(topology, index, n).nodes) all.push_back(node.cpus);
    return all;
  };
  const Topology two = topology_of({4, 2});
  const Ints a = two.nodes[0].cpus, b = two.nodes[1].cpus;
  EXPECT_EQ(cpus(two, 0, 1), (std::vector<Ints>{a, b}));
  EXPECT_EQ(cpus(two, 0, 2), (std::vector<Ints>{{a[0], a[1], a[2]}}));
  EXPECT_EQ(cpus(two, 1, 2), (std::vector<Ints>{{a[3]}, b}));
  EXPECT_EQ(cpus(two, 2, 3), (std::vector<Ints>{b}));
  const Topology small = topology_of({2});
  const Ints& c = small.nodes[0].cpus;
  EXPECT_EQ(cpus(small, 1, 3), (std::vector<Ints>{{c[1]}})) << "fewer cores than processes";
  EXPECT_EQ(cpus(small, 2, 3), (std::vector<Ints>{{c[0]}}));
}

TEST(Topology, RefusesMoreThreadsThanCores) {
  EXPECT_EQ(error_of([] {
              with_threads(topology_of({2, 2}), 5);
            }),
            "--threads 5: this process may use 4 cores; give a number from 1 to 4, or 0 for all of "
            "them");
  EXPECT_TRUE(says(error_of([] { with_threads(topology_of({2, 2}), -1); }), "--threads -1: "));
}

TEST(Slices, CoverEverythingInProportion) {
  using S = std::vector<Slice>;
  EXPECT_EQ(slices(2048, topology_of({8}), 64), (S{{0, 2048}}));
  EXPECT_EQ(slices(2048, topology_of({8, 8}), 64), (S{{0, 1024}, {1024, 1024}}));
  EXPECT_EQ(slices(2048, topology_of({3, 1}), 128), (S{{0, 1536}, {1536, 512}}));
  EXPECT_EQ(slices(1408, topology_of({4, 4}), 64), (S{{0, 704}, {704, 704}}));
  EXPECT_EQ(slices(2048, topology_of({2, 2, 2}), 128), (S{{0, 640}, {640, 768}, {1408, 640}}));
  EXPECT_EQ(slices(40, topology_of({1, 1}), 64), (S{{0, 0}, {0, 40}})) << "nothing to cut";
  // Shares of 60, 64 and 65 and multiples of 128: a half is rounded up.
  EXPECT_EQ(slices(120, topology_of({1, 1}), 128), (S{{0, 0}, {0, 120}}));
  EXPECT_EQ(slices(128, topology_of({1, 1}), 128), (S{{0, 128}, {128, 0}}));
  EXPECT_EQ(slices(130, topology_of({1, 1}), 128), (S{{0, 128}, {128, 2}}));
  EXPECT_EQ(slices(100, topology_of({7, 1}), 128), (S{{0, 100}, {100, 0}})) << "not beyond the end";
  constexpr int64_t kWide = int64_t{1} << 40;
  EXPECT_EQ(slices(kWide, topology_of({3, 1}), 64),
            (S{{0, 3 * (kWide / 4)}, {3 * (kWide / 4), kWide / 4}}));
  EXPECT_EQ(slices(kWide, topology_of({3, 1}), kWide / 4),
            (S{{0, 3 * (kWide / 4)}, {3 * (kWide / 4), kWide / 4}}));
}

TEST(Slices, AreWholeMultiplesNearTheirShare) {
  for (const auto& topology : {topology_of({1}), topology_of({5, 3}), topology_of({1, 2, 3, 4}),
                               topology_of({8, 8, 8, 8, 8, 8, 8, 7})})
    for (const int64_t n : {1, 63, 64, 160, 1408, 1536, 2048, 18432})
      for (const int64_t multiple : {16, 64, 128}) {
        int64_t end = 0, node = 0;
        for (const Slice slice : slices(n, topology, multiple)) {
          EXPECT_EQ(slice.first, end);
          EXPECT_GE(slice.n, 0);
          EXPECT_TRUE(slice.first % multiple == 0 || slice.first == n);
          const double share = static_cast<double>(n) *
                               static_cast<double>(topology.nodes[node++].cpus.size()) /
                               topology.n_cores();
          EXPECT_LE(std::abs(static_cast<double>(slice.n) - share), static_cast<double>(multiple));
          end += slice.n;
        }
        EXPECT_EQ(end, n);
      }
}

TEST(Pin, HoldsTheThreadAndLetsItGo) {
  const Topology topology = this_topology();
  cpu_set_t before, during, after;
  sched_getaffinity(0, sizeof before, &before);
  {
    const Pin pin(topology, topology.nodes[0].cpus[0]);
    if (!pin.holds()) GTEST_SKIP() << "pinning is not permitted";
    sched_getaffinity(0, sizeof during, &during);
    EXPECT_EQ(CPU_COUNT(&during), 1);
    EXPECT_TRUE(CPU_ISSET(topology.nodes[0].cpus[0], &during));
    EXPECT_FALSE(Pin(topology, 100000).holds());
  }
  sched_getaffinity(0, sizeof after, &after);
  EXPECT_TRUE(CPU_EQUAL(&before, &after));
  EXPECT_FALSE(Pin(topology_of({1}), 0).holds()) << "a topology that was not probed";
}

// Whether this process may bind memory, asked without the program under test.
bool binding_is_permitted() {
  constexpr int kBind = 2;  // MPOL_BIND of linux/mempolicy.h
  const Buffer page(4096);
  const unsigned long first_node = 1;
  return syscall(SYS_mbind, page.data(), 4096, kBind, &first_node, 8 * sizeof first_node, 0) == 0;
}

// Reads back on which node pages are, for every node of this machine.
TEST(Memory, ComesFromTheNodeItIsBoundTo) {
  const Topology topology = this_topology();
  for (int node = 0; node < topology.n_nodes(); ++node) {
    const Buffer buffer(1 << 22);
    const std::span<std::byte> memory(buffer.data(), buffer.bytes());
    if (!bind_to_node(topology, memory, node)) {
      EXPECT_FALSE(binding_is_permitted());
      GTEST_SKIP() << "binding memory is not permitted";
    }
    std::fill(memory.begin(), memory.end(), std::byte{1});
    EXPECT_EQ(nodes_of(topology, memory), Ints{topology.nodes[node].index});
  }
  const Buffer buffer(int64_t{topology.n_nodes()} << 22);
  const std::span<std::byte> memory(buffer.data(), buffer.bytes());
  EXPECT_TRUE(bind_to_all_nodes(topology, memory));
  std::fill(memory.begin(), memory.end(), std::byte{1});
  EXPECT_EQ(std::ssize(nodes_of(topology, memory)), topology.n_nodes());
}

// The kernel kills a process that takes more of a node than it has. Zero stands for unknown.
TEST(Memory, OfANodeIsNeverExceeded) {
  Topology topology = this_topology();
  const Buffer buffer(1 << 22);
  if (!binding_is_permitted()) GTEST_SKIP() << "binding memory is not permitted";
  for (const int64_t less : {0, 1}) {
    topology.nodes[0].memory_bytes = buffer.bytes() - less;
    EXPECT_EQ(bind_to_node(topology, buffer.span(), 0), less == 0);
  }
  topology.nodes[0].memory_bytes = 0;
  EXPECT_TRUE(bind_to_node(topology, buffer.span(), 0));
}

TEST(Memory, OfNodesThatDoNotExistIsRefused) {
  Topology topology = this_topology();
  const Buffer buffer(1 << 22);
  const std::span<std::byte> memory(buffer.data(), buffer.bytes());
  EXPECT_TRUE(bind_to_node(topology, {}, 0)) << "nothing to bind";
  topology.nodes.push_back({.index = 4000, .cpus = {0}});
  EXPECT_FALSE(bind_to_node(topology, memory, topology.n_nodes() - 1));
  EXPECT_FALSE(bind_to_node(topology_of({1}), memory, 0));
  EXPECT_FALSE(bind_to_all_nodes(topology_of({1}), memory));
}

}  // namespace
}  // namespace tandem
