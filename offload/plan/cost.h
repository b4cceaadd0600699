// What the parts of a model weigh and cost, from its shapes alone: bytes, operations, bytes on the
// wire. No machine in here.
#pragma once
#include <cstdint>

#include "model/config.h"
#include "ops/weight_format.h"

namespace tandem {

// The number formats of the checkpoint: of everything but routed experts, and of those.
WeightFormat stored_format(const ModelConfig& config);
WeightFormat stored_expert_format(const ModelConfig& config);

// Rows and columns that share a scale of FP8: the configuration's, or 128 where it has none.
int scale_block_of(const ModelConfig& config);

// A matrix's numbers and scales.
int64_t matrix_bytes(const ModelConfig& config, int64_t rows, int64_t cols, WeightFormat format);
int64_t routed_expert_bytes(const ModelConfig& config, WeightFormat format);

// Of one layer, with experts or without, or of all.
struct BackboneBytes {
  int64_t attention = 0, dense = 0, shared = 0, router = 0, norms = 0;
  int64_t total() const { return attention + dense + shared + router + norms; }
};
BackboneBytes backbone_layer_bytes(const ModelConfig& config, bool moe, WeightFormat format);
int64_t embedding_bytes(const ModelConfig& config);  // BF16; the head weighs the same

// What a token needs of activations while it passes through a layer, in numbers of 4 bytes on a CPU
// and of 2 on a GPU: residual stream and norms, queries and head outputs, the wider of dense FFN
// and all its experts.
int64_t activation_values_per_token(const ModelConfig& config);

// Operations of one token, a multiplication and an addition are two.
struct TokenOps {
  double projections = 0;  // of attention without kv_b
  double dense = 0, shared = 0, router = 0, expert = 0, head = 0;
};
TokenOps token_ops(const ModelConfig& config);

// Attention over the cache, of `queries` tokens that end at position `context`: whichever of the
// two forms has fewer operations (model_spec 3.7), with its products of kv_b. Bytes are those of a
// cache in BF16: one in FP8, which is decoded to that, is taken to be no faster.
struct AttentionWork {
  double bytes = 0, ops = 0;
  bool absorbed = true;
};
AttentionWork attention_work(const ModelConfig& config, double queries, double context);

// Expert parallelism, a token and MoE layer, when all chosen experts are on other ranks: FP8 rows
// with a scale a 128 columns out, BF16 rows back.
int64_t dispatch_bytes(const ModelConfig& config);
int64_t combine_bytes(const ModelConfig& config);

}  // namespace tandem
