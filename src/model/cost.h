// Bytes, operations and network traffic of a model's parts, from its shapes alone. Independent of
// the machine.
#pragma once
#include <cstdint>

#include "core/row_format.h"
#include "model/config.h"
#include "model/weight_format.h"

namespace tandem {

constexpr int64_t kBf16Bytes = 2, kFloatBytes = 4;

// The number formats of the checkpoint: of everything but routed experts, and of routed experts.
WeightFormat stored_format(const ModelConfig& config);
WeightFormat stored_expert_format(const ModelConfig& config);

// Rows and columns that share an FP8 scale: the configuration's value, or 128 where it has none.
int scale_block_of(const ModelConfig& config);

// Bytes of a matrix: weights and scales.
int64_t matrix_bytes(const ModelConfig& config, int64_t rows, int64_t cols, WeightFormat format);
int64_t routed_expert_bytes(const ModelConfig& config, WeightFormat format);

// Backbone bytes of one layer, MoE or dense, or the sum over all layers.
struct BackboneBytes {
  int64_t attention = 0, dense = 0, shared = 0, router = 0, norms = 0;
  int64_t total() const { return attention + dense + shared + router + norms; }
};
BackboneBytes backbone_layer_bytes(const ModelConfig& config, bool moe, WeightFormat format);
int64_t embedding_bytes(const ModelConfig& config);  // BF16; the head has the same size

// Activation values per token while it passes through a layer, each 4 bytes on a CPU and 2 on a
// GPU: residual stream and norms, and the larger of attention (queries, head outputs) and FFN
// (dense, or all active experts).
int64_t activation_values_per_token(const ModelConfig& config);

// Operations per token; a multiplication and an addition count as two.
struct TokenOps {
  double projections = 0;  // projections of attention, without kv_b
  double dense = 0, shared = 0, router = 0, expert = 0, head = 0;
};
TokenOps token_ops(const ModelConfig& config);

// Attention over the cache of `queries` tokens that end at position `context`, including the kv_b
// products, in the cheaper of the two forms (attention_form.h). `bytes` are those of a BF16 cache:
// an FP8 cache is decoded to BF16 and assumed to be no faster.
struct AttentionWork {
  double bytes = 0, ops = 0;
  bool absorbed = true;
};
AttentionWork attention_work(const ModelConfig& config, double queries, double context);

// Bytes of a row of activations that goes to another rank, and of its sum that comes back
// (core/row_format.h). Experts are taken to round rows to BF16, as those of all CPUs and GPUs do
// without --activations fp8.
struct RowBytes {
  int64_t there = 0, back = 0;
  int64_t both() const { return there + back; }
};
RowBytes row_bytes(const ModelConfig& config, ExpertRows rows);

// GPUs record steps of up to so many tokens of a replica, which are decode: the kernels of larger
// ones take longer than their launches, so recording would gain nothing. The rows of recorded steps
// go ways that need no number of rows at the host.
constexpr int kMaxRecordedTokens = 32;

}  // namespace tandem
