// The cores and memories that this process may use, NUMA node by NUMA node. Probed here and nowhere
// else; tests describe machines of their own.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

struct hwloc_bitmap_s;
struct hwloc_topology;

namespace tandem {

// Cores and the memory that is near them.
struct TopologyNode {
  int index = 0;             // the operating system's number
  std::vector<int> cpus;     // a hardware thread of each core, by the operating system's numbers
  int64_t memory_bytes = 0;  // 0: not known
};

struct Topology {
  std::vector<TopologyNode> nodes{{.cpus = {0}}};  // at least one; each has a core
  std::vector<std::string> notes;          // a line each: what of the machine is not used, and why
  std::shared_ptr<hwloc_topology> system;  // who pins and binds; none: nobody does

  int n_nodes() const { return static_cast<int>(nodes.size()); }
  int n_cores() const;
};

// What the control group and taskset or numactl leave to this process (hwloc; its environment
// variable HWLOC_SYNTHETIC puts another machine in the place of this one, on which nothing is
// pinned or bound). A thread that is pinned sees its own core only: ask before there are teams.
Topology this_topology();

// The same of a machine in hwloc's words, "numa:2 core:3 pu:1". Throws Error when hwloc does not
// understand them.
Topology synthetic_topology(const std::string& description);

// n_threads of the cores, taken from each node in proportion to what it has; nodes left without one
// drop out. 0: all cores. Throws Error for a negative number or more threads than cores.
Topology with_threads(const Topology& topology, int n_threads);

// [first, first + n).
struct Slice {
  int64_t first, n;
  bool operator==(const Slice&) const = default;
};

// The one place where experts are cut: [0, n) to a slice a node, as long as its share of the cores,
// each but the last a multiple of `multiple`. Where n is small some are empty.
std::vector<Slice> slices(int64_t n, const Topology& topology, int64_t multiple);

// Keeps the thread that makes it on one cpu, as long as it lives.
class Pin {
 public:
  Pin(const Topology& topology, int cpu);
  ~Pin();
  Pin(const Pin&) = delete;
  Pin& operator=(const Pin&) = delete;

  // No when the system refuses (a container without the right to) or there is no such cpu: that
  // costs speed, not correctness.
  bool holds() const { return holds_; }

 private:
  const std::shared_ptr<hwloc_topology> system_;
  hwloc_bitmap_s* const before_;
  bool holds_ = false;
};

// Lets the pages of `memory`, none of them touched yet, come from one node alone, or from all nodes
// in turn. It begins at a page. False when the system refuses or the node has less memory.
bool bind_to_node(const Topology& topology, std::span<std::byte> memory, int node);
bool bind_to_all_nodes(const Topology& topology, std::span<std::byte> memory);

}  // namespace tandem
