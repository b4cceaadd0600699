// The input of one step of the model: tokens, their positions in their sequences, and the rows that
// need logits.
#pragma once
#include <array>
#include <cstdint>
#include <span>

#include "core/tensor.h"

namespace tandem {

constexpr int kMaxDraftTokens = 8;       // upper limit of draft tokens of a sequence per step
constexpr int kMaxStepTokens = 1 << 16;  // upper limit of every option that sets tokens per step
constexpr int kMaxMicroBatches = 4;      // of a step

struct Sequence {
  int32_t first_token;                // index into Batch::tokens
  int32_t n_tokens;                   // 1 when decoding, more when prefilling
  int32_t kv_length;                  // tokens in kv_pages once this step is done
  std::span<const int32_t> kv_pages;  // pages of the KV cache that are attended to, in order
};

struct Batch {
  std::span<const int32_t> tokens;      // [n]
  std::span<const int32_t> positions;   // [n]
  std::span<const Sequence> sequences;  // cover all tokens, in order
  std::span<const int32_t> logit_rows;  // rows of x that the sampler needs
  // [n] for multi-token prediction: rows of the step before whose hidden states these tokens follow
  std::span<const int32_t> hidden_rows = {};
  int micro_batch = 0;  // its number among those of the step
  int n() const { return static_cast<int>(tokens.size()); }
  // Row of the step at which this batch begins; 0 unless it is a micro-batch.
  int first_row() const { return sequences.empty() ? 0 : sequences.front().first_token; }
};

// Layers first to end - 1 of the model's weights and cache.
struct LayerRange {
  int first, end;
};

// The micro-batches of a step: one, or several that pass through the layers alternately. Each has
// its own tokens, positions and sequences; first_token still counts from the beginning of the step.
// logit_rows stay with the step. On a rank of several some or all may be empty.
struct MicroBatches {
  std::array<Batch, kMaxMicroBatches> at;
  int n = 1;
  const Batch* begin() const { return at.data(); }
  const Batch* end() const { return at.data() + n; }
  int n_tokens() const {
    int sum = 0;
    for (const Batch& batch : *this) sum += batch.n();
    return sum;
  }
};

// The experts chosen for each token, with their weights.
struct Routing {
  TensorView ids;      // kI32 [tokens, n_active]
  TensorView weights;  // kF32 [tokens, n_active]
};

}  // namespace tandem
