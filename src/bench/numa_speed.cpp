#include "bench/numa_speed.h"

#include <hwloc.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "core/check.h"

namespace tandem {
namespace {

constexpr int64_t kPieceBytes = 1 << 20;

class Topology {
 public:
  Topology() {
    hwloc_topology_init(&topology_);
    hwloc_topology_load(topology_);
  }
  ~Topology() { hwloc_topology_destroy(topology_); }
  Topology(const Topology&) = delete;
  Topology& operator=(const Topology&) = delete;

  hwloc_topology_t get() const { return topology_; }
  int n_nodes() const { return hwloc_get_nbobjs_by_type(topology_, HWLOC_OBJ_NUMANODE); }
  hwloc_obj_t node(int i) const { return hwloc_get_obj_by_type(topology_, HWLOC_OBJ_NUMANODE, i); }
  int cores_of(int i) const {
    return std::max(
        1, hwloc_get_nbobjs_inside_cpuset_by_type(topology_, node(i)->cpuset, HWLOC_OBJ_CORE));
  }

 private:
  hwloc_topology_t topology_ = nullptr;
};

// Memory of one node, written once.
class NodeMemory {
 public:
  NodeMemory(const Topology& topology, int node, int64_t bytes)
      : topology_(topology),
        bytes_(bytes),
        data_(hwloc_alloc_membind(topology.get(), bytes, topology.node(node)->nodeset,
                                  HWLOC_MEMBIND_BIND, HWLOC_MEMBIND_BYNODESET)) {
    require(data_ != nullptr, "cannot take {} bytes of NUMA node {}", bytes, node);
    std::memset(data_, 1, bytes);
  }
  ~NodeMemory() { hwloc_free(topology_.get(), data_, bytes_); }
  NodeMemory(const NodeMemory&) = delete;
  NodeMemory& operator=(const NodeMemory&) = delete;
  const char* piece(int64_t i) const {
    return static_cast<const char*>(data_) + i % (bytes_ / kPieceBytes) * kPieceBytes;
  }

 private:
  const Topology& topology_;
  const int64_t bytes_;
  void* data_;
};

// All cores of `node` walk through the memory together.
double read_rate(const Topology& topology, int node, const NodeMemory& memory,
                 const cpu::ReadLoop& loop, double seconds) {
  std::atomic<int64_t> next = 0;
  std::atomic<bool> stop = false;
  std::vector<std::thread> threads;
  const auto start = std::chrono::steady_clock::now();
  for (int t = 0; t < topology.cores_of(node); ++t)
    threads.emplace_back([&] {
      hwloc_set_cpubind(topology.get(), topology.node(node)->cpuset, HWLOC_CPUBIND_THREAD);
      do loop.run(memory.piece(next++), kPieceBytes);
      while (!stop);
    });
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  stop = true;
  for (std::thread& thread : threads) thread.join();
  const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
  return static_cast<double>(next * kPieceBytes) / spent.count();
}

}  // namespace

NumaSpeed numa_speed(const cpu::ReadLoop& loop, int64_t bytes, double seconds) {
  const Topology topology;
  const int n = std::max(1, topology.n_nodes());
  bytes = std::max(kPieceBytes, bytes / kPieceBytes * kPieceBytes);
  NumaSpeed speed;
  for (int i = 0; i < n; ++i) {
    const NodeMemory memory(topology, i, bytes);
    speed.nodes.push_back({topology.cores_of(i),
                           static_cast<int64_t>(topology.node(i)->attr->numanode.local_memory),
                           read_rate(topology, i, memory, loop, seconds)});
    if (n == 1) break;
    const double cross = read_rate(topology, (i + n / 2) % n, memory, loop, seconds);
    speed.cross_bytes_per_second = i == 0 ? cross : std::min(speed.cross_bytes_per_second, cross);
  }
  return speed;
}

}  // namespace tandem
