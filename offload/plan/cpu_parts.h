// What the executor obeys of a placement: all of it, as long as everything is on the CPUs of one
// host.
#pragma once
#include "offload/plan/placement.h"
#include "ops/experts_layout.h"

namespace tandem {

struct CpuParts {
  ExpertsLayout experts;
  int64_t kv_tokens;
  int chunk_tokens;  // of a prompt that one step computes
};

// Throws Error for a placement that is not sound (check_placement), and for what no part of this
// program runs yet, naming the layers or the layer and expert: GPUs, other hosts, several formats
// within a layer.
CpuParts cpu_parts(const ModelConfig& config, const Machine& machine, const Placement& placement);

}  // namespace tandem
