// Placements worth comparing. Their kv_tokens are 0: how many sequences to serve is decided with
// each.
#pragma once
#include <functional>

#include "offload/plan/predict.h"

namespace tandem {

// Called with placements that are whole; they need not fit. It may change the one it is given.
using VisitPlacement = std::function<void(Placement&)>;

// Experts in the memory of CPUs, what is left of GPUs for the hottest.
void visit_cpu_candidates(const PlanInput& input, WeightFormat experts,
                          const VisitPlacement& visit);
// Everything on GPUs but what `embedding_on_cpu` says.
void visit_gpu_candidates(const PlanInput& input, WeightFormat experts,
                          const VisitPlacement& visit);

// Sequences of `concurrency` that one replica of the backbone serves.
int64_t sequences_a_replica(const Placement& placement, int concurrency);

// Columns of an expert for each NUMA node, in proportion to bandwidth; empty for one node, or where
// there are fewer blocks than nodes.
std::vector<int> numa_slices(const ModelConfig& config, const Machine& machine);

// Chunks of prompts worth trying, ascending.
std::vector<int> prefill_chunks(const Workload& workload);

// The shortest chunk, a multiple of 64 tokens, for which bringing CPU experts to the GPU is faster
// than computing them where they are; 0: none up to 16,384.
int least_streamed_chunk(const PlanInput& input, const Placement& placement);

}  // namespace tandem
