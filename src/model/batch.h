// What one step of the model computes: the tokens, where each one sits in its sequence, and which
// rows want logits.
#pragma once
#include <array>
#include <cstdint>
#include <span>

#include "core/tensor.h"

namespace tandem {

constexpr int kMostStepTokens = 1 << 16;  // that any option allows

struct Sequence {
  int32_t first_token;                // index into Batch::tokens
  int32_t n_tokens;                   // 1 when decoding, more when prefilling
  int32_t kv_length;                  // tokens in the cache once this step is done
  std::span<const int32_t> kv_pages;  // pages of the KV cache, in order of position
};

struct Batch {
  std::span<const int32_t> tokens;      // [n]
  std::span<const int32_t> positions;   // [n]
  std::span<const Sequence> sequences;  // cover all tokens, in order
  std::span<const int32_t> logit_rows;  // rows of x that the sampler needs
  int n() const { return static_cast<int>(tokens.size()); }
  // Of the step, the row that the first token of this batch has: 0 but in a second micro-batch.
  int first_row() const { return sequences.front().first_token; }
};

// A step, or the two micro-batches that go through the layers in turn. A micro-batch has the
// tokens, positions and sequences of its own; these keep their first_token, and logit_rows are the
// step's.
struct MicroBatches {
  std::array<Batch, 2> at;
  int n = 1;
  const Batch* begin() const { return at.data(); }
  const Batch* end() const { return at.data() + n; }
  int n_tokens() const { return at[n - 1].first_row() + at[n - 1].n(); }
};

// Experts chosen for each token.
struct Routing {
  TensorView ids;      // kI32 [tokens, n_active]
  TensorView weights;  // kF32 [tokens, n_active]
};

}  // namespace tandem
