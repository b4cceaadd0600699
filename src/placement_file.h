// --placement: a file that says where every part of a model lives, as the loader obeys it.
#pragma once
#include <string>

#include "core/topology.h"
#include "offload/plan/cpu_parts.h"

namespace tandem {

// Throws Error for a placement that is broken, does not suit the model, these nodes or this much
// memory, or has parts that this program does not run.
CpuParts parts_of_file(const std::string& path, const ModelConfig& config, const Topology& topology,
                       int64_t memory_bytes);

}  // namespace tandem
