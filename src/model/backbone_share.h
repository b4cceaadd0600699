// Tensor parallelism (Megatron-LM, section 3): the ranks of a model divide the attention heads, the
// hidden columns of dense layers and shared experts, and the rows of the head. What is left of the
// backbone is on every rank.
#pragma once
#include <vector>

#include "core/topology.h"
#include "model/config.h"

namespace tandem {

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
