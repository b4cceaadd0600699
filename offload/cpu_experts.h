// Routed experts in host memory, computed by the kernels of one instruction set: two passes over a
// layer's pairs of (token, expert) with one barrier between, weights read once a pass whatever the
// number of tokens.
#pragma once
#include <atomic>
#include <vector>

#include "core/memory.h"
#include "core/team.h"
#include "cpu_kernels/kernels.h"
#include "model/weights.h"
#include "ops/experts.h"

namespace tandem {

class CpuExperts final : public RoutedExperts {
 public:
  // `weights` holds the packed experts; it, like all references, outlives the object.
  CpuExperts(const cpu::KernelTable& kernels, const ModelConfig& config,
             const ModelWeights& weights, int max_tokens, Team& team);

  void submit(const ExpertBatch& batch) override;
  void add_to(TensorView y) override;

 private:
  // Some pairs of one expert: entries [first, first + n) of tokens_ and pair_weights_.
  struct Group {
    const FfnWeights* weights;
    int first, n;
  };
  void group_by_expert(const ExpertBatch& batch);
  cpu::Activations encode_tokens(TensorView x);
  // Some rows of a group's expert.
  struct Piece {
    const Group& group;
    int first_row;
  };
  void activate(const cpu::Activations& x, Piece piece, Piece next, float* up);
  void encode_activated(const Group& group);
  void project(int first_row, float* part);

  const cpu::KernelTable& kernels_;
  const ModelConfig& c_;
  const ModelWeights& w_;
  Team& team_;
  cpu::ActivationType x_type_, act_type_;
  std::vector<Group> groups_;                 // experts in use, ascending
  std::vector<std::atomic<int>> unfinished_;  // [groups] pieces of the first pass
  std::vector<int32_t> first_of_;             // [n_experts + 1]
  std::vector<int32_t> tokens_;               // [pairs] sorted by expert
  std::vector<float> pair_weights_;           // [pairs]
  std::vector<float> x_scales_, act_scales_;  // of the encoded rows
  Arena arena_;
  TensorView x_;            // [tokens, dim] encoded
  TensorView act_;          // [pairs, expert_dim] silu(gate) * up
  TensorView encoded_act_;  // [pairs, expert_dim] the same, encoded
  TensorView sum_;          // [tokens, dim] of the last submit
  TensorView part_;         // [threads * kGroupTokens, kRows] one expert's output on some rows
  int n_tokens_ = 0;
};

}  // namespace tandem
