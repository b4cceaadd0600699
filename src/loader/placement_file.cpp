#include "loader/placement_file.h"

#include "offload/plan/placement_json.h"

namespace tandem {
namespace {

// The parts of this machine's description that decide whether a placement fits.
Machine machine_of(const Devices& devices) {
  Machine machine;
  machine.name = "this machine";
  const Topology& topology = devices.topology;
  for (const TopologyNode& node : topology.nodes)
    machine.nodes.push_back(
        {static_cast<int>(node.cpus.size()), devices.memory_bytes / topology.n_nodes(), 0});
  if (devices.gpu) machine.gpus.push_back(*devices.gpu);
  return machine;
}

}  // namespace

ExecutedParts parts_of_file(const std::string& path, const ModelConfig& config,
                            const Devices& devices) {
  return executed_parts(config, machine_of(devices), placement_from_file(path));
}

}  // namespace tandem
