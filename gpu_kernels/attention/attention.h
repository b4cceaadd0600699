// Multi-head latent attention on the GPU, absorbed and naive form, over pages of the latent cache.
// Every pointer is device memory. docs/gpu_kernels.md gives the reasons for the kernels' design.
#pragma once
#include "gpu_kernels/launch_shape.h"
#include "gpu_kernels/numbers.h"
#include "gpu_kernels/products/products.h"

namespace tandem::gpu {

constexpr int kPageTokens = 64;
constexpr int kMaxKvRank = kMaxJoinedCols, kMaxCacheDim = 576;  // latent; latent and rope key
constexpr int kMaxQkDim = 192, kMaxVDim = 128;  // naive form, nope padded to a multiple of 8

// Rows of [kv_rank latent | rope_dim key], both even. BF16 rows take stride * 2 bytes per token,
// stride a multiple of 8. FP8 rows take kFp8TokenBytes per token: 512 FP8 numbers, 4 float scales
// for 128 of them each, and a BF16 key of 64; smaller models are padded with zeros.
constexpr int kFp8TokenBytes = 656;
struct LatentCache {
  const void* data;  // [pages, kPageTokens]; tokens beyond a sequence are not read
  int64_t stride;
  int kv_rank, rope_dim;
  bool fp8;
};

// Writes tokens to an FP8 cache: each 128 latents are divided by their scale, the largest magnitude
// / 448, and rounded; a block with a number that is not finite becomes NaN. Columns of the cache
// beyond kv_rank and rope_dim become 0.
struct AppendFp8Args {
  const float* kv;  // [tokens, kv_rank + rope_dim]
  int64_t kv_stride;
  const int32_t* rows_of_cache;  // [tokens]
  void* cache;                   // [.., kFp8TokenBytes]
  int tokens, kv_rank, rope_dim;
};
void append_fp8(const Stream& stream, const AppendFp8Args& args);

// Sequence s has query tokens first_token[s] to first_token[s] + n_tokens[s] - 1, the last of its
// kv_length[s] tokens in the cache. A token attends to itself and all earlier tokens.
struct PagedSequences {
  const int32_t* first_token;  // [n]
  const int32_t* n_tokens;     // [n]; 0: no queries
  const int32_t* kv_length;    // [n]
  const int32_t* pages;        // [n, max_pages], in order of position
  int n, max_pages;
  int max_tokens;  // per sequence: sets the grid size
};

// Absorbed form, for few tokens per sequence. Scores are q c + q_rope k_rope, the output is the
// weighted sum of latents c. Up to n_splits blocks share the context of a sequence; a second kernel
// combines them, or the product that follows does.
struct MlaDecodeArgs {
  const float* q;       // [tokens * n_heads, kv_rank]
  const float* q_rope;  // [tokens * n_heads, rope_dim]
  LatentCache cache;
  PagedSequences sequences;
  float* partial;      // scratch [n_splits, tokens * n_heads, kMaxJoinedCols]
  float* partial_lse;  // scratch [n_splits, tokens * n_heads]: log2 of the sum of exponentials
  float* out;          // [tokens * n_heads, kv_rank]
  int64_t q_stride, q_rope_stride, out_stride;  // even, but q_rope_stride
  int64_t n_rows;                               // tokens * n_heads over all sequences
  int n_heads, n_splits;
  float softmax_scale;
  bool combines = true;  // false: with n_splits > 1 nothing is written to `out`
};
void mla_decode(const Stream& stream, const MlaDecodeArgs& args);
// What mla_decode() without combining leaves of the rows from first_row on: no parts, but `out`, if
// n_splits is 1.
AttentionParts attention_parts(const MlaDecodeArgs& args, int64_t first_row);
// The number of splits, up to max_splits, for which blocks fill a GPU best.
int mla_decode_splits(int n_sequences, int max_tokens, int n_heads, int n_multiprocessors,
                      int max_splits);

// Naive form, for many tokens of one sequence: kv_b restores keys and values from the latents, of
// some heads and of a piece of the context at a time. Its rows are [nope_dim keys | v_dim values]
// per head.
struct PrefillPlan {
  int heads, keys;  // at a time; keys: a multiple of kPrefillKeys, or at least kv_length
};
constexpr int kPrefillKeys = 64;  // keys of a tile
struct MlaPrefillArgs {
  const float* q;       // [n_tokens * n_heads, nope_dim]
  const float* q_rope;  // [n_tokens * n_heads, rope_dim]
  LatentCache cache;
  const int32_t* pages;  // pages of the sequence, in order of position
  Weight kv_b;           // [n_heads * (nope_dim + v_dim), kv_rank]
  bf16* latents;         // scratch [kv_length, kv_rank rounded up to a multiple of 16]
  bf16* restored;        // scratch [plan.keys, plan.heads * (nope_dim + v_dim)]
  float* carried;        // scratch [n_tokens * n_heads, 2]; unused if plan.keys >= kv_length
  float* out;            // [n_tokens * n_heads, v_dim]
  int64_t q_stride, q_rope_stride, out_stride;
  int n_tokens, kv_length;
  int n_heads, nope_dim, v_dim;
  PrefillPlan plan;
  float softmax_scale;
};
void mla_prefill(const Stream& stream, const MlaPrefillArgs& args);
// The plan of the shortest time, for scratch of `capacity` restored (token, head) pairs, at least
// kPrefillKeys.
struct PrefillSize {
  int n_tokens, kv_length, n_heads;
  int64_t capacity;
  int n_multiprocessors;
};
PrefillPlan mla_prefill_plan(const PrefillSize& size);

}  // namespace tandem::gpu
