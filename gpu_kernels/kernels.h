// Launchers of the small GPU kernels: plain structs in, work enqueued on the stream, nothing
// allocated. Activations are float (docs/gpu.md gives the reasons), with a stride in elements
// between rows. Every pointer is device memory unless stated otherwise. Launches with 0 rows do
// nothing.
#pragma once
#include "gpu_kernels/launch_shape.h"
#include "gpu_kernels/numbers.h"

namespace tandem::gpu {

// Some columns of a row-major matrix of floats.
struct Matrix {
  float* data;
  int64_t stride;  // elements from row to row
};

// out[i] = table[tokens[i]], widened.
struct EmbedArgs {
  const int32_t* tokens;  // [rows]
  const void* table;      // [vocab, cols]
  int64_t table_stride;   // elements from row to row
  Number type;
  Matrix out;  // [rows, cols]
  int rows, cols;
};
void embed(const Stream& stream, const EmbedArgs& args);

// out[i] = x[rows_of_x[i]].
struct GatherArgs {
  Matrix x;
  const int32_t* rows_of_x;  // [rows]
  Matrix out;                // [rows, cols]
  int rows, cols;
};
void gather_rows(const Stream& stream, const GatherArgs& args);

// out = x / sqrt(mean(x^2) + eps) * gain, row by row; out may be x.
struct RmsNormArgs {
  Matrix x;           // [rows, dim]
  const float* gain;  // [dim]
  Matrix out;         // [rows, dim]
  int rows, dim;
  float eps;
  Matrix delta = {};  // [rows, dim], added to x in place first; null: nothing is
};
void rms_norm(const Stream& stream, const RmsNormArgs& args);

struct ElementwiseArgs {
  Matrix x;      // [rows, cols], changed in place
  Matrix other;  // [rows, cols]
  int rows, cols;
};
void add(const Stream& stream, const ElementwiseArgs& args);       // x += other
void silu_mul(const Stream& stream, const ElementwiseArgs& args);  // x = silu(x) * other
void clear(const Stream& stream, const ElementwiseArgs& args);     // x = 0; no other

// Rotates the adjacent pairs (2i, 2i + 1) of each row in place by position * frequencies[i].
struct RopeArgs {
  Matrix x;                  // [tokens * rows_per_token, 2 * n_pairs]
  const int32_t* positions;  // [tokens]
  const float* frequencies;  // [n_pairs]
  float amplitude;           // factor of the result
  int tokens, rows_per_token, n_pairs;
};
void rope(const Stream& stream, const RopeArgs& args);

// cache[rows_of_cache[t]] = kv[t].
struct AppendArgs {
  Matrix kv;                     // [tokens, cols]
  const int32_t* rows_of_cache;  // [tokens]
  bf16* cache;                   // [.., cols]
  int64_t cache_stride;
  int tokens, cols;
};
void append_kv(const Stream& stream, const AppendArgs& args);

// What attention does with a token before it attends: rotates its queries in place, normalises its
// latents, rotates its key, and writes both to the cache, in BF16, or in FP8 as append_fp8() does.
struct RotateAppendArgs {
  Matrix q_rope;      // [tokens * n_heads, rope_dim]
  Matrix kv;          // [tokens, kv_rank + rope_dim], not changed
  const float* gain;  // [kv_rank]
  float eps;
  const int32_t* positions;      // [tokens]
  const float* frequencies;      // [rope_dim / 2]
  const int32_t* rows_of_cache;  // [tokens]
  void* cache;
  int64_t cache_stride;  // BF16: elements from row to row
  bool fp8;
  float amplitude;
  int tokens, n_heads, kv_rank, rope_dim;
};
void rotate_and_append(const Stream& stream, const RotateAppendArgs& args);

// Sorts the (token, expert) pairs of a step by expert, then by token: pair i of token t becomes row
// row_of[t, i], and rows offsets[e] to offsets[e + 1] - 1 belong to expert e. Pairs with negative
// experts are skipped: their row is -1.
constexpr int kMaxExperts = 1024;
struct SortPairsArgs {
  const int32_t* ids;  // [tokens, n_active], rows ids_stride apart, below n_experts
  int64_t ids_stride;
  int32_t* offsets;         // [n_experts + 1], out
  int32_t* row_of;          // [tokens, n_active], out
  int32_t* tokens_of_rows;  // [tokens * n_active], out
  int tokens, n_active, n_experts;
};
void sort_pairs(const Stream& stream, const SortPairsArgs& args);

}  // namespace tandem::gpu
