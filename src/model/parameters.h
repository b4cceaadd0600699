// Counts a model's layers, parameters and KV cache bytes per token from the configuration alone.
#pragma once
#include <cstdint>

#include "core/tensor.h"
#include "model/config.h"

namespace tandem {

// Number of MoE layers in [first, last], and in the whole model.
int moe_layers(const ModelConfig& config, int first, int last);
int moe_layers(const ModelConfig& config);

struct LayerParameters {
  int64_t attention = 0;       // including the norms of the latents
  int64_t dense_mlp = 0;       // 0 in a MoE layer
  int64_t shared_experts = 0;  // the four below are 0 in a dense layer
  int64_t routed_experts = 0;
  int64_t router = 0;  // including its bias
  int64_t norms = 0;   // the two norms of the residual stream
  int64_t total() const {
    return attention + dense_mlp + shared_experts + routed_experts + router + norms;
  }
};

struct ParameterCounts {
  // The main model without MTP layers; the counts add up to total.
  int64_t embedding = 0;
  int64_t head = 0;       // 0 when tied to the embedding
  int64_t attention = 0;  // including the norms of the latents
  int64_t dense_mlp = 0, shared_experts = 0, routed_experts = 0;
  int64_t router = 0;  // including its bias
  int64_t norms = 0;   // of the residual stream, including the final norm
  int64_t total = 0;

  int64_t one_expert = 0;  // parameters of one routed expert
  int64_t activated = 0;   // read for one token: including the head, excluding the embedding

  // The multi-token prediction (MTP) layers, not part of total.
  int64_t mtp = 0;            // excluding embedding and head, which they share with the model
  int64_t mtp_stored = 0;     // including the copies of embedding and head in the checkpoint
  int64_t mtp_activated = 0;  // read for a drafted token: including head, excluding embedding
};

// Parameters of one layer of the main model; `moe` says whether it is a MoE layer.
LayerParameters count_layer_parameters(const ModelConfig& config, bool moe);

ParameterCounts count_parameters(const ModelConfig& config);

}  // namespace tandem
