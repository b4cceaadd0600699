// Absorbed attention of any dimensions, one block per query: the reference for the fast kernels,
// also used for small models. Everything but the cache is float.
#pragma once
#include "gpu_kernels/kernels.h"

namespace tandem::gpu {

// The location of the keys of a step's tokens.
struct CachePages {
  const int32_t* sequence_of;  // [tokens]
  const int32_t* places;  // [tokens] in the pages of the sequence; a token sees all up to its own
  const int32_t* pages;   // [sequences, pages_stride]
  int64_t pages_stride;
  int page_size;
};

// out = sum over keys of softmax(scale * (q . latent + q_rope . key)) latent.
struct PlainAttentionArgs {
  Matrix q;           // [n_tokens * n_heads, rank]
  Matrix q_rope;      // [n_tokens * n_heads, rope_dim]
  const bf16* cache;  // [.., rank + rope_dim]
  int64_t cache_stride;
  CachePages at;
  Matrix out;                 // [n_tokens * n_heads, rank]
  int first_token, n_tokens;  // tokens of the step
  int n_heads, rank, rope_dim;
  float scale;
};
void plain_attention(const Stream& stream, const PlainAttentionArgs& args);
constexpr int kMaxPlainRank = 2048, kMaxPlainDim = 2304;  // limits of rank and of rank + rope_dim

}  // namespace tandem::gpu
