// Tensor parallelism (Megatron-LM, section 3): the ranks of a model divide the attention heads, the
// hidden columns of dense layers and shared experts, and the rows of the head. What is left of the
// backbone is on every rank.
#pragma once
#include <vector>

#include "core/rounding.h"
#include "core/topology.h"
#include "model/config.h"

namespace tandem {

// The ranks of a model. Those of a pipeline stage follow each other and have the same layers.
// Within a stage, those of a replica of the backbone follow each other and divide it; each replica
// computes tokens of its own (data parallelism), and all ranks of the stage divide its routed
// experts.
struct BackboneGrid {
  int n_replicas = 1;
  int tp = 1;  // ranks of a replica in a stage
  int n_stages = 1;
  int n_ranks() const { return n_stages * n_of_stage(); }
  int n_of_stage() const { return n_replicas * tp; }
  BackboneGrid of_stage() const { return {n_replicas, tp}; }
  int stage_of(int rank) const { return rank / n_of_stage(); }
  int in_stage(int rank) const { return rank % n_of_stage(); }  // its number there
  int replica_of(int rank) const { return in_stage(rank) / tp; }
  // The first of a replica's ranks in a stage, which replies for them.
  int first_rank(int stage, int replica) const { return stage * n_of_stage() + replica * tp; }
  // The rank that has the logits of a replica and replies for it.
  int rank_of_logits(int replica) const { return first_rank(n_stages - 1, replica); }
  // The number of a rank among those of its replica.
  int part_of(int rank) const { return rank % tp; }
  // All ranks of a replica have its n tokens. These are the ones that `rank` sends to others.
  Slice tokens_of(int rank, int64_t n) const {
    const int64_t part = part_of(rank), first = n * part / tp;
    return {first, n * (part + 1) / tp - first};
  }
  // The tokens that all ranks send when each replica has up to n.
  int most_tokens(int n) const { return n_ranks() * static_cast<int>(ceil_div(n, tp)); }
};

// The model's layers of a pipeline stage; n is 0 where there is one stage, which has all.
using StageLayers = Slice;
constexpr StageLayers kAllLayers = {0, 0};
constexpr bool has_layer(StageLayers stage, int layer) {
  return stage.n == 0 || (layer >= stage.first && layer < stage.first + stage.n);
}

// What the ranks of all replicas of a stage divide; those of one replica divide the rest. Takes
// less memory, and rows of all replicas travel for it.
struct SharedByReplicas {
  bool dense = false;  // the FFN of dense layers
  bool head = false;
  bool any() const { return dense || head; }
  bool operator==(const SharedByReplicas&) const = default;
};

// The part of one rank. Slices begin at whole blocks of scales; a rank may have none of something.
struct BackboneShare {
  int rank;
  Slice heads;
  Slice dense, shared;              // hidden columns of the FFN
  std::vector<Slice> vocab;         // [ranks] columns of the logits that each brings to its replica
  StageLayers layers = kAllLayers;  // the first stage has the embedding, the last one the head
  SharedByReplicas by_replicas = {};
  int replica = 0;
  // [replicas] the parts of vocab[rank] that the like ranks of all replicas have; empty: this rank
  // has all of it.
  std::vector<Slice> vocab_of_replicas = {};
  // Rows of the head.
  Slice head() const { return by_replicas.head ? vocab_of_replicas[replica] : vocab[rank]; }
  bool is_first_stage() const { return layers.first == 0; }
  bool is_last_stage(const ModelConfig& config) const {
    return layers.n == 0 || layers.first + layers.n == config.n_layers;
  }
};

// Divides what can be divided as evenly as its blocks allow.
BackboneShare share_of_rank(const ModelConfig& config, int rank, int n_ranks,
                            StageLayers layers = kAllLayers);
// The share of a rank of the grid where those of all replicas divide some of it.
BackboneShare share_among_replicas(const ModelConfig& config, int rank, BackboneGrid grid,
                                   SharedByReplicas shared, StageLayers layers = kAllLayers);
// The same among those ranks of a replica that `divide`, [ranks]; the others have none of it.
BackboneShare share_of_rank(const ModelConfig& config, int rank, const std::vector<bool>& divide,
                            StageLayers layers = kAllLayers);

// The share of the only rank.
inline BackboneShare whole_backbone(const ModelConfig& config) {
  return share_of_rank(config, 0, 1);
}

}  // namespace tandem
