// The part of a placement that the executor runs: everything on the CPUs of one host, the backbone
// on its first GPU and experts on both, or everything divided among the CPUs of several hosts.
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
};

constexpr int kMeasuredCrossover = -1;

struct ExecutedParts {
  ExpertsLayout experts;  // in host memory
  int64_t kv_tokens;
  DType kv_type;
  int chunk_tokens;             // tokens of a prompt per step
  std::optional<GpuParts> gpu;  // empty: the CPUs compute everything
  // [n_all_layers][n_experts], empty for a dense layer: the rank that has each expert. Empty: one
  // rank has all.
  std::vector<std::vector<int>> rank_of_expert = {};
};

// A process among those that run a placement together: rank r has the CPUs of host r.
struct PlacedRank {
  int rank = 0, n_ranks = 1;
};

// Throws Error for a placement that is not sound (check_placement), and for what the executor does
// not support, naming the layers or the layer and expert: GPUs that `machine` lacks or that are not
// its first, experts on a GPU without the backbone, hosts without a rank, ranks without a host, a
// backbone that all ranks do not divide, several formats among the experts that a host has of a
// layer. `machine` has a host for each rank.
ExecutedParts executed_parts(const ModelConfig& config, const Machine& machine,
                             const Placement& placement, PlacedRank rank = {});

// The number of hosts whose CPUs divide the whole backbone, which run the placement as ranks; 1: it
// is divided in another way, or not at all.
int n_cpu_ranks(const Placement& placement);

// True if no routed expert is left to the CPU.
bool all_on_gpu(const GpuParts& parts);

// Places `n_experts` experts on the GPU, distributed evenly over the layers, lowest indices first.
GpuParts evenly_on_gpu(const ModelConfig& config, int64_t n_experts);

}  // namespace tandem
