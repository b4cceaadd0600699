// The part of a placement that the executor runs: everything on the CPUs of one host, the backbone
// on its first GPU and experts on both, or everything divided among the CPUs of several hosts.
// Where the placement has workers, it is what the host with the backbone has (placed_workers.h).
#pragma once
#include <optional>

#include "model/experts_layout.h"
#include "offload/plan/placement.h"

namespace tandem {

// Parts placed on the GPU when it holds the backbone.
struct GpuParts {
  bool embedding_on_cpu = false;
  // Steps of at least this many tokens stream the CPU's experts to the GPU. 0: none.
  // kMeasuredCrossover: the threshold is measured once the experts are loaded.
  int stream_from_tokens = 0;
  // Decode steps of at least this many sequences run as two micro-batches; 0: none.
  int micro_batches_from_sequences = 0;
  // [n_all_layers][n_experts], empty for a dense layer: true for experts on the GPU.
  std::vector<std::vector<bool>> experts;
  // Likewise, true for experts that neither this GPU nor the CPU beside it has; empty: there are
  // none.
  std::vector<std::vector<bool>> on_other_ranks = {};
  // The columns of every expert that this GPU has, where the GPUs of all ranks divide all experts;
  // nothing: experts are whole.
  std::optional<Slice> expert_columns = {};
};

constexpr int kMeasuredCrossover = -1;

// [n_all_layers][n_experts], empty for a dense layer: the ranks of its stage that have each expert,
// ascending.
using RanksOfExperts = std::vector<std::vector<std::vector<int>>>;

struct ExecutedParts {
  ExpertsLayout experts;  // in host memory
  int64_t kv_tokens;
  DType kv_type;
  int chunk_tokens;                     // tokens of a prompt per step
  std::optional<GpuParts> gpu;          // empty: the CPUs compute everything
  RanksOfExperts ranks_of_expert = {};  // empty: one rank has all, or has slices of all
  BackboneGrid grid = {};
  SharedByReplicas by_replicas = {};
  std::vector<StageLayers> stages = {};  // [stages]; empty: there is one
  // Micro-batches of a step in which replicas exchange rows; 0: the number that is measured to be
  // faster.
  int micro_batches = 0;
  ExpertRows rows = ExpertRows::kExact;  // as they travel between ranks
};

// A process among those that run a placement together: rank r has the r-th device of the stages,
// whose hosts follow each other from any one on. Ranks with GPUs divide the CPUs of their host.
struct PlacedRank {
  int rank = 0, n_ranks = 1;
  int n_of_host = 1;  // ranks of each host
};

// Throws Error for a placement that is not sound (check_placement, with the memory of the rank's
// host where there are several ranks), and for what the executor does
// not support, naming the layers or the layer and expert: GPUs that `machine` lacks or that are not
// its first, experts on a GPU without the backbone, hosts without a rank, ranks without a host, a
// backbone that is not on all ranks, a replica on GPUs and CPUs, stages of unlike grids, experts
// away from the backbone of their layer, several formats among the experts that a host has of a
// layer, micro-batches and a head that ranks do not have so, and what check_with_workers() refuses.
// `machine` has a host for each rank; with workers it is the host of the backbone.
ExecutedParts executed_parts(const ModelConfig& config, const Machine& machine,
                             const Placement& placement, PlacedRank rank = {});

// Why the hosts of this machine, each with its ranks, do not run a sound placement, in one line;
// empty: they run it. With workers it is why_not_run().
std::string why_not_executed(const ModelConfig& config, const Machine& machine,
                             const Placement& placement);

// The number of devices that have the backbone, in any grid, and run the placement as ranks: the
// CPUs of successive hosts, GPUs 0, 1, .. of each of them, or the CPU of some and GPUs of others.
// 1: it is divided in another way, or not at all.
int n_ranks_of(const Placement& placement);

// [ranks] whether each has its part of the backbone on a GPU; n_ranks_of() of them.
std::vector<bool> ranks_on_gpus(const Placement& placement);
// Whether some of the ranks compute on GPUs and others do not.
bool are_of_two_kinds(const std::vector<bool>& on_gpu);

// True if several ranks have the same expert.
bool has_replicas(const ExecutedParts& parts);

// True if no routed expert is left to the CPU.
bool all_on_gpu(const GpuParts& parts);

// Places `n_experts` experts on the GPU, distributed evenly over the layers, lowest indices first.
// `on_other_ranks` as in GpuParts: those are left out.
GpuParts evenly_on_gpu(const ModelConfig& config, int64_t n_experts,
                       std::vector<std::vector<bool>> on_other_ranks = {});
// What the CPU beside this GPU does not have.
Elsewhere beside_cpu(const GpuParts& parts);

}  // namespace tandem
