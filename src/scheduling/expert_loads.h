// How evenly the work of the routed experts is divided among ranks: pure functions of how often
// experts were chosen, and where they are.
#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/topology.h"
#include "offload/balance/rebalance.h"
#include "scheduling/expert_window.h"

namespace tandem {

// Where the routed experts of a model are.
struct ExpertHomes {
  int n_ranks = 1;
  int n_of_host = 1 << 30;                 // ranks of a host, which are adjacent
  int n_groups = 1;                        // the router's
  std::vector<Slice> ranks_of_layer = {};  // [n_all_layers] the ranks of the layer's stage
  // [n_all_layers][n_experts] the ranks that have the expert, which divide its rows evenly; empty
  // for a dense layer. Each of its ranks may also have a slice.
  std::vector<std::vector<std::vector<int>>> ranks = {};
  // [n_all_layers][n_experts] whether a process that has the whole backbone has the expert in its
  // GPU's memory; empty: the backbone is on several ranks, or on the CPU.
  std::vector<std::vector<bool>> on_gpu = {};
  std::vector<bool> fixed = {};  // [n_ranks] whose experts stay; empty: of none

  // Whether experts move between the GPU and the CPU beside it, if they do; else between ranks.
  bool exchanges_with_gpu() const { return n_ranks == 1 && !on_gpu.empty(); }
  // After a move: the ranks of the changes, which are numbered in the layer's stage, or kGpuOwner
  // and kHostOwner.
  void apply(std::span<const ExpertChange> changes);
};

// A row is a token at one of the experts that it chose.
struct ExpertLoads {
  struct Layer {
    int64_t n_rows = 0;
    // The mean of the rows of the ranks, divided by the rows of the rank with the most: 1 if all
    // have as many. 1 without rows.
    double balancedness = 1;
    double gpu_share = 0;  // of the rows, at experts in the GPU's memory
  };
  std::vector<Layer> layers = {};    // [n_all_layers]
  double balancedness = 1;           // mean of the layers, weighted by their rows; 1 without rows
  double gpu_share = 0;              // of all rows
  std::vector<double> of_rank = {};  // [n_ranks] rows of all layers
};

// `uses` and `homes` are those of one model.
ExpertLoads loads_of(const ExpertUses& uses, const ExpertHomes& homes);

}  // namespace tandem
