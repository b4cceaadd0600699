// Routed experts in host memory, computed by the kernels of one instruction set. All NUMA nodes
// compute their slices of each expert at the same time, and their sums are added at the end.
// Weights are read once per pass for any number of tokens.
#pragma once
#include <memory>
#include <vector>

#include "offload/expert_slice.h"

namespace tandem {

class CpuExperts final : public ExpertPool {
 public:
  // `weights` holds a slice of each packed expert for every node of the team, at least of the
  // experts that will be used. All references outlive the object.
  CpuExperts(const cpu::KernelTable& kernels, const ModelConfig& config,
             const ModelWeights& weights, int max_tokens, Team& team);

  // The kernels, weights and threads that compute the experts.
  const cpu::KernelTable& kernels() const { return kernels_; }
  const ModelWeights& weights() const { return w_; }
  Team& team() { return team_; }
  // [layers] type of the activations that the products multiply: submit() encodes float rows to it.
  // kF32 for a layer without experts.
  std::vector<cpu::ActivationType> activations() const;

  // submit() computes everything, for one ticket at a time. To interleave other work: begin(), then
  // compute_below() with ascending numbers, the last one n_experts, then add_to(0, y). Each call
  // computes the experts below the number that were not computed before; the sum is bit-identical.
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
