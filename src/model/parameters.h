// How many layers and parameters a model has and how many bytes a token takes in its KV cache, from
// the configuration alone.
#pragma once
#include <cstdint>

#include "core/tensor.h"
#include "model/config.h"

namespace tandem {

// Layers with experts from `first` to `last`, and of all.
int moe_layers(const ModelConfig& config, int first, int last);
int moe_layers(const ModelConfig& config);

struct LayerParameters {
  int64_t attention = 0;       // with the norms of the latents
  int64_t dense_mlp = 0;       // 0 in a MoE layer
  int64_t shared_experts = 0;  // the four below are 0 in a dense layer
  int64_t routed_experts = 0;
  int64_t router = 0;  // with its bias
  int64_t norms = 0;   // the two of the residual stream
  int64_t total() const {
    return attention + dense_mlp + shared_experts + routed_experts + router + norms;
  }
};

struct ParameterCounts {
  // Parts of the main model; they add up to total.
  int64_t embedding = 0;
  int64_t head = 0;       // 0 when tied to the embedding
  int64_t attention = 0;  // with the norms of the latents
  int64_t dense_mlp = 0, shared_experts = 0, routed_experts = 0;
  int64_t router = 0;  // with its bias
  int64_t norms = 0;   // of the residual stream, with the final one
  int64_t total = 0;

  int64_t one_expert = 0;  // routed; 0 if there are none
  int64_t activated = 0;   // read for a token: with the head, without the embedding

  // The multi-token prediction layers, not part of total.
  int64_t mtp = 0;            // their own
  int64_t mtp_stored = 0;     // with the copies of embedding and head that checkpoints hold
  int64_t mtp_activated = 0;  // read for a drafted token: with the head, without the embedding
};

// One layer of the main model; `moe` is ModelConfig::is_moe of it.
LayerParameters count_layer_parameters(const ModelConfig& config, bool moe);

ParameterCounts count_parameters(const ModelConfig& config);

// Of a token and layer in a cache of FP8, which GPUs know: gpu_kernels/attention.h has its parts.
constexpr int kFp8TokenBytes = 656;
// Whether latents fit into that, as all DeepSeek models' do.
bool takes_fp8_cache(const MlaConfig& mla);
// Bytes of one token in the KV cache of one layer, in BF16 or FP8, and of all layers of the main
// model.
int64_t kv_layer_bytes(const ModelConfig& config, DType type);
int64_t kv_bytes_per_token(const ModelConfig& config, DType type = DType::kBF16);

}  // namespace tandem
