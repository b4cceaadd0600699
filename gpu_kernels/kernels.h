// Launchers of the small GPU kernels: plain structs in, work enqueued on the stream, nothing
// allocated. Activations are float (docs/gpu.md says why), rows a stride of elements apart; every
// pointer is device memory unless it says otherwise. Nothing is done for 0 rows.
#pragma once
#include "gpu_kernels/numbers.h"
#include "gpu_kernels/runtime.h"

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
  int64_t table_stride;   // numbers from row to row
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
  float amplitude;           // of what comes out
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

// Chooses n_active experts of each token as model_spec's router does: the CPU's route_token() is
// the slow twin. Equal scores: the lower index wins.
enum class RouterScoring : uint8_t { kSoftmax, kSigmoid };
enum class GroupScore : uint8_t { kNone, kBest, kSumOfBestTwo };  // kNone: groups do not matter
struct RouterArgs {
  Matrix logits;      // [tokens, n_experts]
  const float* bias;  // [n_experts] added for the choice only; null: none
  Matrix weights;     // [tokens, n_active], out
  int32_t* ids;       // [tokens, n_active], rows ids_stride apart, out; best first
  int64_t ids_stride;
  int tokens, n_experts, n_active;
  int n_groups, n_active_groups;
  RouterScoring scoring;
  GroupScore group_score;
  bool normalize;  // weights of a token sum to 1, before
  float scale;     // is applied
};
void route(const Stream& stream, const RouterArgs& args);

// Sorts the (token, expert) pairs of a step by expert, tokens in order: pair i of token t becomes
// row row_of[t, i], and rows offsets[e] to offsets[e + 1] belong to expert e. Pairs of negative
// experts are left out: their row is -1.
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
