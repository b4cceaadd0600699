// Candidate placements. Their kv_tokens are 0: the number of sequences is decided for each
// candidate. Candidates follow from the model, the counts of hosts and GPUs, and memory, not from
// rates. A larger machine is offered every candidate of a smaller one, so more hardware is never
// predicted to be slower.
#pragma once
#include <functional>

#include "offload/plan/predict.h"

namespace tandem {

// Receives the candidates. `home` identifies stages and experts: placements with the same home
// share both.
struct CandidateSearch {
  // Enters a complete placement, which need not fit. The placement may be modified.
  std::function<void(Placement&, int64_t home)> enter;
  // A lower bound of the score over all chunks, micro-batch counts and placements of embedding and
  // head; infinite if none of them fits. Modifies those fields, kv_tokens and stream_from_tokens.
  std::function<double(Placement&, int64_t home, const RoutingStatistics&)> promise;
  // The score with the workload's concurrency, whether the placement fits or not.
  std::function<double(const Placement&, int64_t home)> score;
  // True if a placement with this score cannot win any more.
  std::function<bool(double score)> hopeless;
  int64_t n_homes = 0;
};

// Visits placements with experts in CPU memory and the hottest ones in the remaining GPU memory.
void visit_cpu_candidates(const PlanInput& input, WeightFormat experts, CandidateSearch& contest);
// Visits placements with everything on GPUs, except the embedding where `embedding_on_cpu` is set.
void visit_gpu_candidates(const PlanInput& input, WeightFormat experts, CandidateSearch& contest);

// Counts of a kind's hosts to try: all up to 16, then steps of about an eighth, and all hosts.
std::vector<int> host_counts(const HostKind& kind);
// Counts to try where several kinds are combined: all up to 4, then doubled, and all hosts.
std::vector<int> few_host_counts(const HostKind& kind);

// Sequences per replica of the backbone for a total of `concurrency`, rounded up.
int64_t sequences_a_replica(const Placement& placement, int concurrency);

// Columns of an expert for each NUMA node, in proportion to bandwidth. Empty for one node, and
// where there are fewer blocks of kSplitMultiple columns than nodes.
std::vector<int> numa_slices(const ModelConfig& config, const HostKind& kind);
// The slices of every kind of hosts; empty if no kind has slices.
NumaColumns numa_slices_of_kinds(const ModelConfig& config, const Machine& machine);

// Prefill chunk sizes to try, in tokens, ascending.
std::vector<int> prefill_chunks(const Workload& workload);

// The shortest chunk, a multiple of 64 tokens, for which streaming CPU experts to the GPU is faster
// than computing them on the CPU; 0 if there is none up to 16,384.
int least_streamed_chunk(const PlanInput& input, const Placement& placement);

}  // namespace tandem
