// One NUMA node's part of a MoE layer: its slice of every expert, computed by its own threads in
// two passes, without communication between nodes.
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

// The (token, expert) pairs of a layer, sorted by expert; the same for all nodes.
struct ExpertPairs {
  // Some pairs of one expert: entries [first, first + n) of tokens and weights.
  struct Group {
    int expert, first, n;
  };
  std::vector<Group> groups;  // used experts, ascending
  std::vector<int32_t> tokens;
  std::vector<float> weights;
};
constexpr int kGroupTokens = 256;  // maximum tokens of one group

class ExpertSlice {
 public:
  // `node` is an index of the slices of `weights` and of the nodes of the team. All references
  // outlive the object.
  ExpertSlice(const cpu::KernelTable& kernels, const ModelConfig& config,
              const ModelWeights& weights, int max_tokens, const Team& team, int node);

  void begin(const ExpertBatch& batch, const ExpertPairs& pairs);
  // Prepares some of the layer's groups, ascending from call to call, and returns the number of
  // items for run(). Items may wait for earlier ones.
  int64_t take(std::span<const ExpertPairs::Group> groups);
  // Runs an item on thread `thread` of the node.
  void run(int64_t item, int thread);

  // sum of weight * expert(x) over this slice and the groups taken, [tokens, dim], once every item
  // has run; empty for an empty slice.
  const TensorView& sum() const { return sum_; }
  bool is_empty() const { return width_ == 0; }

 private:
  // Some rows of a group's expert.
  struct Piece {
    int64_t group;
    int first_row;
  };
  // Rows of a group, at most a tile of them, which are tiled from entry `first` of the pairs on.
  struct Tile {
    int64_t group;
    int first, n;
  };
  Piece piece_at(int64_t item) const;
  void tile_rows(Tile tile);
  const FfnWeights& expert(int64_t group) const;
  void encode_token(int64_t token);
  void activate(Piece piece, Piece next, float* up);
  void encode_activated(const ExpertPairs::Group& group, int thread);
  void project(int first_row, float* part);
  void add_output(int64_t group, int first_row, int64_t next_group, int next_row, float* part);

  const cpu::KernelTable& kernels_;
  const ModelConfig& c_;
  const ModelWeights& w_;
  const int n_threads_, node_;
  const int width_;  // columns of the slice
  Arena arena_;
  TensorView x_;            // [tokens, dim] encoded
  TensorView tiles_;        // [pairs, dim] rows of x in tiles, group by group
  TensorView act_;          // [pairs, width] silu(gate) * up
  TensorView encoded_act_;  // [pairs, width] the same, encoded, in tiles where products take them
  TensorView rows_;         // [threads * kTileRows, width] encoded, before they are tiled
  TensorView sum_;          // [tokens, dim]
  TensorView part_;         // [threads * kGroupTokens, kRows] some rows of one expert's output
  std::vector<float> x_scales_, act_scales_;  // scales of encoded rows

  // State of the current layer.
  const ExpertPairs* pairs_ = nullptr;
  std::span<const ExpertPairs::Group> groups_;  // the groups taken last
  bool is_first_ = false;                       // whether they are the layer's first
  const FfnWeights* experts_ = nullptr;         // [n_experts]
  TensorView tokens_;                           // [tokens, dim]
  cpu::Activations x_of_pass_;
  cpu::ActivationType x_type_{}, act_type_{};
  bool encodes_ = false;                      // whether tokens are encoded before the first pass
  bool tiles_x_ = false, tiles_act_ = false;  // whether the passes' products take tiled rows
  std::vector<Tile> tiles_of_x_;              // made before the first pass
  int64_t n_tokens_ = 0, n_encoded_tokens_ = 0, n_pieces_ = 0;
  int pieces_ = 0;                            // pieces of a group in the first pass
  int second_rows_ = 0;                       // rows of an item in the second pass
  std::atomic<int64_t> tokens_left_;          // tokens to be encoded
  std::vector<std::atomic<int>> untiled_;     // [groups] tiles of x to be made
  std::vector<std::atomic<int>> unfinished_;  // [groups] pieces of the first pass, plus encoding
};

}  // namespace tandem
