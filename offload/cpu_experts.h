// Routed experts in host memory, computed by the kernels of one instruction set: every NUMA node
// computes its slice of each expert at the same time as the others, and their sums are added at the
// end. Weights are read once a pass whatever the number of tokens.
#pragma once
#include <memory>
#include <vector>

#include "offload/expert_slice.h"

namespace tandem {

class CpuExperts final : public ExpertPool {
 public:
  // `weights` holds the packed experts in a slice for each node of the team, those that are asked
  // for; it, like all references, outlives the object.
  CpuExperts(const cpu::KernelTable& kernels, const ModelConfig& config,
             const ModelWeights& weights, int max_tokens, Team& team);

  // What they are computed with.
  const cpu::KernelTable& kernels() const { return kernels_; }
  const ModelWeights& weights() const { return w_; }
  Team& team() { return team_; }
  // What the products of each layer multiply: submit() encodes float rows as this. kF32 for a layer
  // without experts.
  std::vector<cpu::ActivationType> activations() const;

  // submit() computes everything, for one ticket at a time. In pieces, between which other work may
  // be done: begin(), then compute_below() with ascending numbers, the last n_experts, then
  // add_to(0, y). Each call computes the experts below the number that were not computed before;
  // the sum is the same to the bit.
  void begin(const ExpertBatch& batch);
  void compute_below(int expert);
  // Slices are added in the order of the nodes.
  void add_to(Ticket ticket, TensorView y) override;

 private:
  Ticket start(const ExpertBatch& batch) override;
  void group_by_expert(const ExpertBatch& batch);

  const cpu::KernelTable& kernels_;
  const ModelConfig& c_;
  const ModelWeights& w_;
  Team& team_;
  ExpertPairs pairs_;
  std::vector<std::unique_ptr<ExpertSlice>> slices_;  // [nodes]
  std::vector<int64_t> n_items_;                      // [nodes]
  std::vector<int32_t> first_of_;                     // [n_experts + 1]
  size_t n_computed_ = 0;                             // groups of pairs
  int n_tokens_ = 0;
  bool is_submitted_ = false;
};

}  // namespace tandem
