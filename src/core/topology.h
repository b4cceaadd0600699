// The cores and memory that this process may use, per NUMA node. Probed only here; tests use
// synthetic machines.
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

// The cores of one NUMA node and its local memory.
struct TopologyNode {
  int index = 0;             // the operating system's number of the node
  std::vector<int> cpus;     // one hardware thread per core, numbered by the operating system
  int64_t memory_bytes = 0;  // 0: unknown
};

struct Topology {
  std::vector<TopologyNode> nodes{{.cpus = {0}}};  // at least one; each has a core
  std::vector<std::string> notes;  // a line for each unused part of the machine, with the reason
  std::shared_ptr<hwloc_topology> system;  // pins threads and binds memory; null: neither is done

  int n_nodes() const { return static_cast<int>(nodes.size()); }
  int n_cores() const;
};

// The cores and memory that the control group, taskset and numactl leave to this process; of the
// cores only as many as its quota of processor time. Uses hwloc; its environment variable
// HWLOC_SYNTHETIC replaces this machine by a synthetic one, on which nothing is pinned or bound and
// no quota holds. A pinned thread sees only its own core, so call this before any
// team exists.
Topology this_topology();

// The topology of a machine described in hwloc's synthetic format, "numa:2 core:3 pu:1". Throws
// Error when hwloc cannot parse the description.
Topology synthetic_topology(const std::string& description);

// A topology of n_threads cores, taken from each node in proportion to its number of cores; nodes
// without any are omitted. 0: all cores. Throws Error for a negative number or more threads than
// cores.
Topology with_threads(const Topology& topology, int n_threads);

// The cores of the index-th of n processes that share all of them: adjacent cores, and one core
// with others where there are fewer cores than processes.
Topology share_of(const Topology& topology, int index, int n);

// The range [first, first + n).
struct Slice {
  int64_t first, n;
  bool operator==(const Slice&) const = default;
};

// As many cores as a quota of processor time, in cores, is enough for, at least one, with a note
// where they are fewer. Threads beyond the quota would stop all others: each waits for the slowest.
Topology within_quota(const Topology& topology, double quota);

// Divides [0, n) into one slice per node, in proportion to the nodes' cores; every cut is at a
// multiple of `multiple`. Some slices are empty when n is small. The only place that decides how
// experts are sliced.
std::vector<Slice> slices(int64_t n, const Topology& topology, int64_t multiple);

// Pins the constructing thread to one CPU for the lifetime of the object.
class Pin {
 public:
  Pin(const Topology& topology, int cpu);
  ~Pin();
  Pin(const Pin&) = delete;
  Pin& operator=(const Pin&) = delete;

  // False when the system refuses to pin (a container without the permission) or there is no such
  // CPU: that costs speed, not correctness.
  bool holds() const { return holds_; }

 private:
  const std::shared_ptr<hwloc_topology> system_;
  hwloc_bitmap_s* const before_;
  bool holds_ = false;
};

// Binds the pages of `memory` to one node, or interleaves them over all nodes. `memory` begins at a
// page boundary and has not been touched. Returns false when the system refuses, or the node has
// less memory.
bool bind_to_node(const Topology& topology, std::span<std::byte> memory, int node);
bool bind_to_all_nodes(const Topology& topology, std::span<std::byte> memory);

}  // namespace tandem
