// --placement: a file that says where every part of a model lives, as the loader obeys it.
#pragma once
#include <string>

#include "core/topology.h"
#include "offload/plan/executed_parts.h"

namespace tandem {

// What there is of this machine.
struct Devices {
  const Topology& topology;
  int64_t memory_bytes;
  std::optional<Gpu> gpu;
};

// Throws Error for a placement that is broken, does not suit the model or these devices, or has
// parts that this program does not run.
ExecutedParts parts_of_file(const std::string& path, const ModelConfig& config,
                            const Devices& devices);

}  // namespace tandem
