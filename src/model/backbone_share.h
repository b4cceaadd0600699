// Tensor parallelism (Megatron-LM, section 3): the ranks of a model divide the attention heads, the
// hidden columns of dense layers and shared experts, and the rows of the head. What is left of the
// backbone is on every rank.
#pragma once
#include <vector>

#include "core/topology.h"
#include "model/config.h"

namespace tandem {

// The ranks of a model. Those of a replica of the backbone follow each other and divide it; each
// replica computes tokens of its own (data parallelism), and all ranks divide the routed experts.
struct BackboneGrid {
  int n_replicas = 1;
  int tp = 1;  // ranks of a replica
  int n_ranks() const { return n_replicas * tp; }
  int replica_of(int rank) const { return rank / tp; }
  int first_rank_of(int replica) const { return replica * tp; }
  // The number of a rank among those of its replica.
  int part_of(int rank) const { return rank % tp; }
  // Of the n tokens of a replica, which all of its ranks have, those that `rank` sends to others.
  Slice tokens_of(int rank, int64_t n) const {
    const int64_t part = part_of(rank), first = n * part / tp;
    return {first, n * (part + 1) / tp - first};
  }
  // The tokens that all ranks send when each replica has up to n.
  int most_tokens(int n) const { return n_ranks() * ((n + tp - 1) / tp); }
};

// The part of one rank. Slices begin at whole blocks of scales; a rank may have none of something.
struct BackboneShare {
  int rank;
  Slice heads;
  Slice dense, shared;       // hidden columns of the FFN
  std::vector<Slice> vocab;  // [ranks] rows of the head, of every rank
};

// Divides what can be divided as evenly as its blocks allow.
BackboneShare share_of_rank(const ModelConfig& config, int rank, int n_ranks);

// The share of the only rank.
inline BackboneShare whole_backbone(const ModelConfig& config) {
  return share_of_rank(config, 0, 1);
}

}  // namespace tandem
