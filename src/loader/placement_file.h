// Reads the file of --placement for the loader.
#pragma once
#include <string>

#include "core/topology.h"
#include "offload/plan/executed_parts.h"

namespace tandem {

// The devices of this machine.
struct Devices {
  const Topology& topology;
  int64_t memory_bytes;
  std::optional<Gpu> gpu;
};

// Throws Error for a placement that is malformed, does not suit the model or these devices, or has
// parts that this program does not run.
ExecutedParts parts_of_file(const std::string& path, const ModelConfig& config,
                            const Devices& devices);

}  // namespace tandem
