#include "placement_file.h"

#include "offload/plan/placement_json.h"

namespace tandem {
namespace {

// As much of this machine as tells whether a placement fits.
Machine machine_of(const Topology& topology, int64_t memory_bytes) {
  Machine machine;
  machine.name = "this machine";
  for (const TopologyNode& node : topology.nodes)
    machine.nodes.push_back(
        {static_cast<int>(node.cpus.size()), memory_bytes / topology.n_nodes(), 0});
  return machine;
}

}  // namespace

CpuParts parts_of_file(const std::string& path, const ModelConfig& config, const Topology& topology,
                       int64_t memory_bytes) {
  return cpu_parts(config, machine_of(topology, memory_bytes), placement_from_file(path));
}

}  // namespace tandem
