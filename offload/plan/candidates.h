// Placements worth comparing. Their kv_tokens are 0: how many sequences to serve is decided with
// each. Which are offered follows from the model, the counts of hosts and GPUs, and memory, not
// from rates; and all that a machine is offered, a larger one is too: so more of anything is never
// slower.
#pragma once
#include <functional>

#include "offload/plan/predict.h"

namespace tandem {

// What is done with candidates. A `home` names stages and experts: those alike in both share it.
struct Contest {
  // Of a placement that is whole; it need not fit. It may be changed.
  std::function<void(Placement&, int64_t home)> enter;
  // Changes what is named. The least score with any chunk, micro-batches, embedding and head, or
  // less; infinite if none of them fits.
  std::function<double(Placement&, int64_t home, const RoutingStatistics&)> promise;
  // Its score with the workload's concurrency, whether it fits or not.
  std::function<double(const Placement&, int64_t home)> score;
  // Whether a score cannot win any more.
  std::function<bool(double score)> hopeless;
  int64_t n_homes = 0;
};

// Experts in the memory of CPUs, what is left of GPUs for the hottest.
void visit_cpu_candidates(const PlanInput& input, WeightFormat experts, Contest& contest);
// Everything on GPUs but what `embedding_on_cpu` says.
void visit_gpu_candidates(const PlanInput& input, WeightFormat experts, Contest& contest);

// Some hosts of a machine: all counts up to 16, then about every eighth larger, and all.
std::vector<int> host_counts(const Machine& machine);

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
