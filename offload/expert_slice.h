// One NUMA node's part of a MoE layer: its slice of every expert, computed by its own threads in
// two passes, without a word to other nodes.
#pragma once
#include <atomic>
#include <span>
#include <vector>

#include "core/memory.h"
#include "core/team.h"
#include "cpu_kernels/kernels.h"
#include "model/weights.h"
#include "ops/expert_pool.h"

namespace tandem {

// The pairs of (token, expert) of a layer, sorted by expert; the same for all nodes.
struct ExpertPairs {
  // Some pairs of one expert: entries [first, first + n) of tokens and weights.
  struct Group {
    int expert, first, n;
  };
  std::vector<Group> groups;  // experts in use, ascending
  std::vector<int32_t> tokens;
  std::vector<float> weights;
};
constexpr int kGroupTokens = 256;  // tokens of one expert that are a group of their own

class ExpertSlice {
 public:
  // `node` counts the slices of `weights` and the nodes of the team. All references outlive the
  // object.
  ExpertSlice(const cpu::KernelTable& kernels, const ModelConfig& config,
              const ModelWeights& weights, int max_tokens, const Team& team, int node);

  void begin(const ExpertBatch& batch, const ExpertPairs& pairs);
  // Prepares some of the layer's groups, ascending from call to call: how many items run() is to be
  // called for. Items are pieces of work that may wait for earlier ones.
  int64_t take(std::span<const ExpertPairs::Group> groups);
  // thread: of the node
  void run(int64_t item, int thread);

  // sum of weight * expert(x) over this slice and the groups taken, [tokens, dim], once every item
  // has run; the slice may be empty.
  const TensorView& sum() const { return sum_; }
  bool is_empty() const { return width_ == 0; }

 private:
  // Some rows of a group's expert.
  struct Piece {
    int64_t group;
    int first_row;
  };
  Piece piece_at(int64_t item) const;
  const FfnWeights& expert(int64_t group) const;
  void encode_token(int64_t token);
  void activate(Piece piece, Piece next, float* up);
  void encode_activated(const ExpertPairs::Group& group);
  void project(int first_row, float* part);
  void add_output(int64_t group, int first_row, int64_t next_group, int next_row, float* part);

  const cpu::KernelTable& kernels_;
  const ModelConfig& c_;
  const ModelWeights& w_;
  const int n_threads_, node_;
  const int width_;  // of the slice
  Arena arena_;
  TensorView x_;            // [tokens, dim] encoded
  TensorView act_;          // [pairs, width] silu(gate) * up
  TensorView encoded_act_;  // [pairs, width] the same, encoded
  TensorView sum_;          // [tokens, dim]
  TensorView part_;         // [threads * kGroupTokens, kRows] one expert's output on some rows
  std::vector<float> x_scales_, act_scales_;  // of the encoded rows

  // The layer that is computed.
  const ExpertPairs* pairs_ = nullptr;
  std::span<const ExpertPairs::Group> groups_;  // those that were taken last
  bool is_first_ = false;                       // they are the layer's first
  const FfnWeights* experts_ = nullptr;         // [n_experts]
  TensorView tokens_;                           // [tokens, dim]
  cpu::Activations x_of_pass_;
  cpu::ActivationType x_type_{}, act_type_{};
  bool encodes_ = false;  // the tokens, before the first pass
  int64_t n_tokens_ = 0, n_encoded_tokens_ = 0, n_pieces_ = 0;
  int pieces_ = 0;                            // of a group, in the first pass
  int second_rows_ = 0;                       // of an item of the second pass
  std::atomic<int64_t> tokens_left_;          // to be encoded
  std::vector<std::atomic<int>> unfinished_;  // [groups] pieces of the first pass, and encoding
};

}  // namespace tandem
