// Routed experts in host memory, computed by the kernels of one instruction set: every NUMA node
// computes its slice of each expert at the same time as the others, and their sums are added at the
// end. Weights are read once a pass whatever the number of tokens.
#pragma once
#include <memory>
#include <vector>

#include "offload/expert_slice.h"

namespace tandem {

class CpuExperts final : public RoutedExperts {
 public:
  // `weights` holds the packed experts in a slice for each node of the team; it, like all
  // references, outlives the object.
  CpuExperts(const cpu::KernelTable& kernels, const ModelConfig& config,
             const ModelWeights& weights, int max_tokens, Team& team);

  void submit(const ExpertBatch& batch) override;
  // Slices are added in the order of the nodes.
  void add_to(TensorView y) override;

 private:
  void group_by_expert(const ExpertBatch& batch);

  const ModelConfig& c_;
  Team& team_;
  ExpertPairs pairs_;
  std::vector<std::unique_ptr<ExpertSlice>> slices_;  // [nodes]
  std::vector<int64_t> n_items_;                      // [nodes]
  std::vector<int32_t> first_of_;                     // [n_experts + 1]
  int n_tokens_ = 0;
};

}  // namespace tandem
