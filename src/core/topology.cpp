#include "core/topology.h"

#include <hwloc.h>

#include <algorithm>

#include "core/check.h"
#include "core/machine_info.h"
#include "core/memory.h"

namespace tandem {
namespace {

using Bitmap = std::unique_ptr<hwloc_bitmap_s, decltype(&hwloc_bitmap_free)>;

Bitmap empty_bitmap() { return {hwloc_bitmap_alloc(), hwloc_bitmap_free}; }

std::shared_ptr<hwloc_topology> new_topology() {
  hwloc_topology_t topology = nullptr;
  require(hwloc_topology_init(&topology) == 0, "hwloc cannot start: out of memory");
  return {topology, hwloc_topology_destroy};
}

// The hardware threads that the process may run on.
Bitmap allowed_cpus(hwloc_topology_t topology) {
  Bitmap allowed{hwloc_bitmap_dup(hwloc_topology_get_allowed_cpuset(topology)), hwloc_bitmap_free};
  Bitmap bound = empty_bitmap();
  // STRICT fails when threads have different bindings. They then belong to a team of this program
  // and say nothing about the process.
  if (hwloc_topology_is_thissystem(topology) &&
      hwloc_get_cpubind(topology, bound.get(), HWLOC_CPUBIND_PROCESS | HWLOC_CPUBIND_STRICT) == 0)
    hwloc_bitmap_and(allowed.get(), allowed.get(), bound.get());
  return allowed;
}

std::vector<hwloc_obj_t> objects(hwloc_topology_t topology, hwloc_obj_type_t type) {
  std::vector<hwloc_obj_t> all;
  for (hwloc_obj_t o = nullptr; (o = hwloc_get_next_obj_by_type(topology, type, o));)
    all.push_back(o);
  return all;
}

int64_t memory_of(hwloc_obj_t node) {
  return static_cast<int64_t>(node->attr->numanode.local_memory);
}

// The node that holds a core's memory: the largest of its local nodes (some processors have a
// small, fast memory as well), or else the first node that has memory.
size_t node_of(hwloc_obj_t core, const std::vector<hwloc_obj_t>& nodes) {
  size_t best = 0;
  const auto near_memory = [&](size_t i) {
    return hwloc_bitmap_isset(core->nodeset, nodes[i]->os_index) ? memory_of(nodes[i]) : 0;
  };
  for (size_t i = 1; i < nodes.size(); ++i)
    if (near_memory(i) > near_memory(best)) best = i;
  if (near_memory(best) > 0) return best;
  const auto any = std::find_if(nodes.begin(), nodes.end(), memory_of);
  return any == nodes.end() ? 0 : any - nodes.begin();
}

Topology probe(std::shared_ptr<hwloc_topology> system) {
  const hwloc_topology_t handle = system.get();
  require(hwloc_topology_load(handle) == 0, "hwloc cannot detect the cores of this machine");
  const Bitmap allowed = allowed_cpus(handle);
  const std::vector<hwloc_obj_t> nodes = objects(handle, HWLOC_OBJ_NUMANODE);
  std::vector<hwloc_obj_t> cores = objects(handle, HWLOC_OBJ_CORE);
  if (cores.empty()) cores = objects(handle, HWLOC_OBJ_PU);

  std::vector<TopologyNode> found;
  found.reserve(nodes.size());
  for (const hwloc_obj_t node : nodes)
    found.push_back({static_cast<int>(node->os_index), {}, memory_of(node)});
  for (const hwloc_obj_t core : cores) {
    Bitmap usable{hwloc_bitmap_dup(core->cpuset), hwloc_bitmap_free};
    hwloc_bitmap_and(usable.get(), usable.get(), allowed.get());
    const int cpu = hwloc_bitmap_first(usable.get());
    if (cpu >= 0) found[node_of(core, nodes)].cpus.push_back(cpu);
  }

  Topology topology{.nodes = {}, .notes = {}, .system = std::move(system)};
  for (TopologyNode& node : found) {
    if (!node.cpus.empty()) {
      topology.nodes.push_back(std::move(node));
    } else if (node.memory_bytes > 0) {
      topology.notes.push_back(
          fmt::format("NUMA node {} has {:.1f} GB of memory and no core that this process may use: "
                      "no experts are kept there",
                      node.index, gigabytes(node.memory_bytes)));
    } else {
      topology.notes.push_back(fmt::format(
          "NUMA node {} has no memory: its cores use that of another node", node.index));
    }
  }
  require(!topology.nodes.empty(), "hwloc finds no core that this process may use");
  return topology;
}

// Number of cores of nodes [0, node).
int64_t cores_before(const Topology& topology, int node) {
  int64_t n = 0;
  for (int i = 0; i < node; ++i) n += std::ssize(topology.nodes[i].cpus);
  return n;
}

bool bind_pages(const Topology& topology, std::span<std::byte> memory, hwloc_const_bitmap_t nodes,
                hwloc_membind_policy_t policy) {
  return memory.empty() ||
         hwloc_set_area_membind(topology.system.get(), memory.data(), memory.size(), nodes, policy,
                                HWLOC_MEMBIND_STRICT | HWLOC_MEMBIND_BYNODESET) == 0;
}

}  // namespace

int Topology::n_cores() const { return static_cast<int>(cores_before(*this, n_nodes())); }

Topology this_topology() {
  Topology topology = probe(new_topology());
  if (!hwloc_topology_is_thissystem(topology.system.get())) return topology;
  return within_quota(topology, processor_quota());
}

Topology synthetic_topology(const std::string& description) {
  std::shared_ptr<hwloc_topology> system = new_topology();
  require(hwloc_topology_set_synthetic(system.get(), description.c_str()) == 0,
          "\"{}\" is not a valid synthetic topology of hwloc", description);
  return probe(std::move(system));
}

Topology with_threads(const Topology& topology, int n_threads) {
  const int cores = topology.n_cores();
  require(n_threads >= 0 && n_threads <= cores,
          "--threads {}: this process may use {} cores; give a number from 1 to {}, or 0 for all "
          "of them",
          n_threads, cores, cores);
  if (n_threads == 0) return topology;
  const std::vector<Slice> parts = slices(n_threads, topology, 1);
  Topology part = topology;
  part.nodes.clear();
  for (int i = 0; i < topology.n_nodes(); ++i) {
    if (parts[i].n == 0) continue;
    part.nodes.push_back(topology.nodes[i]);
    part.nodes.back().cpus.resize(parts[i].n);
  }
  return part;
}

Topology share_of(const Topology& topology, int index, int n) {
  const int64_t cores = topology.n_cores();
  check(index >= 0 && index < n && cores > 0, "process of a host");
  int64_t first = cores * index / n, end = cores * (index + 1) / n;
  if (cores < n) first = index % cores, end = first + 1;
  Topology part = topology;
  part.nodes.clear();
  for (int node = 0; node < topology.n_nodes(); ++node) {
    const std::vector<int>& cpus = topology.nodes[node].cpus;
    const int64_t before = cores_before(topology, node), size = std::ssize(cpus);
    const int64_t from = std::clamp(first - before, int64_t{0}, size);
    const int64_t to = std::clamp(end - before, int64_t{0}, size);
    if (from == to) continue;
    part.nodes.push_back(topology.nodes[node]);
    part.nodes.back().cpus.assign(cpus.begin() + from, cpus.begin() + to);
  }
  return part;
}

Topology within_quota(const Topology& topology, double quota) {
  if (quota >= topology.n_cores()) return topology;
  const int n_threads = std::max(1, static_cast<int>(quota));
  Topology part = with_threads(topology, n_threads);
  part.notes.push_back(
      fmt::format("the control group's quota is the time of {:.4g} of {} cores: {} {} used", quota,
                  topology.n_cores(), n_threads, n_threads == 1 ? "is" : "are"));
  return part;
}

std::vector<Slice> slices(int64_t n, const Topology& topology, int64_t multiple) {
  const int64_t cores = topology.n_cores();
  const auto cut = [&](int node) {  // first index of the node, rounded to the nearest multiple
    if (node == topology.n_nodes()) return n;
    const int64_t share = n * cores_before(topology, node);
    return std::min(n, (share + cores * multiple / 2) / (cores * multiple) * multiple);
  };
  std::vector<Slice> parts;
  parts.reserve(topology.n_nodes());
  for (int i = 0; i < topology.n_nodes(); ++i) parts.push_back({cut(i), cut(i + 1) - cut(i)});
  return parts;
}

Pin::Pin(const Topology& topology, int cpu)
    : system_(topology.system), before_(hwloc_bitmap_alloc()) {
  if (!system_ || hwloc_get_cpubind(system_.get(), before_, HWLOC_CPUBIND_THREAD) != 0) return;
  const Bitmap one = empty_bitmap();
  hwloc_bitmap_only(one.get(), cpu);
  holds_ = hwloc_set_cpubind(system_.get(), one.get(), HWLOC_CPUBIND_THREAD) == 0;
}

Pin::~Pin() {
  if (holds_) hwloc_set_cpubind(system_.get(), before_, HWLOC_CPUBIND_THREAD);
  hwloc_bitmap_free(before_);
}

bool bind_to_node(const Topology& topology, std::span<std::byte> memory, int node) {
  const int64_t room = topology.nodes[node].memory_bytes;
  // The kernel kills a process that touches a bound page when the node has no memory left.
  if (!topology.system || (room > 0 && std::ssize(memory) > room)) return false;
  const Bitmap one = empty_bitmap();
  hwloc_bitmap_only(one.get(), topology.nodes[node].index);
  return bind_pages(topology, memory, one.get(), HWLOC_MEMBIND_BIND);
}

bool bind_to_all_nodes(const Topology& topology, std::span<std::byte> memory) {
  if (!topology.system) return false;
  const Bitmap all = empty_bitmap();
  for (const TopologyNode& node : topology.nodes) hwloc_bitmap_set(all.get(), node.index);
  return bind_pages(topology, memory, all.get(), HWLOC_MEMBIND_INTERLEAVE);
}

}  // namespace tandem
