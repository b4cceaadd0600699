// Products of activations with FP8 or BF16 weights on the GPU: launchers only, nothing is
// allocated. Every pointer is device memory. FP8 weights contain no NaN, and their scale blocks
// have a multiple of 64 columns (of 128 in per_head_product(), of 4 in exact_product()).
// docs/gpu_kernels.md gives the reasons for each kernel's design.
#pragma once
#include "gpu_kernels/launch_shape.h"
#include "gpu_kernels/products/weight.h"

namespace tandem::gpu {

// For blocks that share an output: the last block adds the parts, always in the same order.
struct Workspace {
  float* partial;      // scratch; each launcher states the size
  uint32_t* counters;  // kCounters; 0 before and after a launch
};
constexpr int kCounters = 4096;

// What a product of few tokens does with a second matrix, of the type, columns and scale blocks of
// the first.
enum class Second : uint8_t {
  kNone,
  kBeside,  // its product is a second output
  kGated,   // the first is gate, the second up, of equal rows: out = silu(x gate^T) * (x up^T)
};

// out = x w^T for 1 to 16 tokens, limited by reading w (FP8 or BF16). x is rounded to BF16.
constexpr int kSkinnyTokens = 16;
struct SkinnyArgs {
  const float* x;  // [n_tokens, w.cols]
  Weight w;
  float* out;  // [n_tokens, w.rows]
  int64_t x_stride, out_stride;
  int n_tokens;
  Workspace workspace;
  // These decide how often columns are split; 0 bytes per second: not known.
  int n_multiprocessors;
  double bytes_per_second = 0;
  Second second = Second::kNone;
  Weight w_2 = {};
  float* out_2 = nullptr;  // kBeside: [n_tokens, w_2.rows]
  int64_t out_2_stride = 0;
  // [w.cols]: x is normalised first, x / sqrt(mean(x^2) + eps) * gain. Null: it is not. Every block
  // reads the whole rows of x for it.
  const float* gain = nullptr;
  float eps = 0;
};
void skinny_product(const Stream& stream, const SkinnyArgs& args);
// Floats of Workspace::partial; reads the shapes of args only.
int64_t skinny_partials(const SkinnyArgs& args);
// The share of the memory's bandwidth that the launch's division into blocks allows, as far as is
// known without measuring; reads the shapes only.
double skinny_share(const SkinnyArgs& args);

// out = x w^T without rounding: float activations, weights decoded to float, any type, scale blocks
// and number of tokens. For matrices that the other kernels do not support.
struct ExactArgs {
  const float* x;  // [n_tokens, w.cols]
  Weight w;
  float* out;  // [n_tokens, w.rows]
  int64_t x_stride, out_stride;
  int n_tokens;
};
void exact_product(const Stream& stream, const ExactArgs& args);

// Rows that are the weighted sums of n parts each. The weights of a row are 2^lse over the sum of
// 2^lse of its parts; a part whose lse is -infinity is not read.
constexpr int kMaxJoinedCols = 512;
struct AttentionParts {
  const float* sums;  // [n, n_rows, kMaxJoinedCols]
  const float* lse;   // [n, n_rows]
  int n = 0;
  int64_t n_rows;
  int cols;
};

// Each head has its own rows in w (FP8 or BF16), from first_row + head * rows_per_head on: out[t,
// h] = x[t, h] w_h^T with out_cols rows of w per head or, transposed, x[t, h] w_h with x_cols rows.
// Any number of tokens. Row t * n_heads + h of x and out belongs to head h. x is rounded to BF16;
// transposed, x times the scale of w is.
struct PerHeadArgs {
  const float* x;  // [n_tokens * n_heads, x_cols]
  Weight w;        // cols == x_cols, or out_cols where transposed
  float* out;      // [n_tokens * n_heads, out_cols]
  int64_t x_stride, out_stride;
  int n_tokens, n_heads, x_cols, out_cols, first_row, rows_per_head;
  bool transposed;
  // If there are any, x is joined from them, and `x` is not read: at most kJoinTokens tokens and
  // kMaxJoinedCols columns, not transposed.
  AttentionParts parts = {};
};
constexpr int kJoinTokens = 4;
void per_head_product(const Stream& stream, const PerHeadArgs& args);

// The position of a column of x in products of many tokens. Tensor core lanes take 4 columns of FP8
// at a time, so of every 16 columns, columns 4 t and 4 t + 1 form the first half, 4 t + 2 and 4 t +
// 3 the second.
constexpr int product_column(int column) {
  return column / 16 * 16 + column / 2 % 2 * 8 + column % 16 / 4 * 2 + column % 2;
}

// Columns of such rows of x in memory, padded with zeros.
constexpr int64_t product_stride(int64_t cols) { return (cols + 15) / 16 * 16; }

// Rounds float rows to BF16 in the order of product_column(), padded with zeros to out_stride.
struct RoundArgs {
  const float* x;                // [n_rows, cols]
  bf16* out;                     // [n_rows, out_stride]
  int64_t x_stride, out_stride;  // out_stride: product_stride() of cols
  int64_t n_rows;
  int cols;
};
void round_rows(const Stream& stream, const RoundArgs& args);

// Rows in FP8, columns in order: value[r][c] = codes[r * stride + c] * scales[r * scale_stride + c
// / 128].
struct Fp8Rows {
  fp8_e4m3* codes = nullptr;  // [n_rows, stride]; null: none
  float* scales = nullptr;    // [n_rows, scale_stride]
  int64_t stride = 0, scale_stride = 0;
};
constexpr int kFp8Block = 128;  // columns per scale

// Rounds float rows to FP8, padded with zeros to a multiple of 16 columns; out.stride is such a
// multiple. Like act_quant() of DeepSeek-V3's inference/kernel.py, the largest magnitude of a block
// becomes 448. A block of zeros stays zero; a block with a number that is not finite becomes NaN.
struct RoundFp8Args {
  const float* x;  // [n_rows, cols]
  Fp8Rows out;
  int64_t x_stride, n_rows;
  int cols;
};
void round_rows_fp8(const Stream& stream, const RoundFp8Args& args);

// True if products with these weights take FP8 x, on a GPU with GpuInfo::fp8_mma.
inline bool takes_fp8_rows(const Weight& w) {
  return w.type == Number::kF8E4M3 && w.scale && w.block_cols == kFp8Block;
}

// out = x w^T for many tokens on tensor cores; w is BF16, or FP8 decoded exactly to BF16 in
// registers. If w and x are both FP8, mma sums blocks of 128 columns (on a GPU with fewer bits than
// a float) and floats add these sums.
struct MatrixArgs {
  const bf16* x;       // [n_tokens, w.cols], as written by round_rows()
  Fp8Rows x_fp8 = {};  // replaces x if not empty; needs takes_fp8_rows(w)
  Weight w;
  float* out;               // [n_tokens, w.rows]
  bf16* rounded = nullptr;  // output if `out` is null; columns are then not split
  int64_t x_stride, out_stride;
  int n_tokens;
  Workspace workspace;  // matrix_partials() floats
  int n_multiprocessors = 0;
};
void matrix_product(const Stream& stream, const MatrixArgs& args);
int64_t matrix_partials(const Weight& w, int n_tokens, int n_multiprocessors);

// Assigns rows to experts. If `slots` is 0, rows are sorted by expert, and expert e has rows
// offsets[e] to offsets[e + 1] - 1. Otherwise each expert has `slots` rows, from e * slots on, of
// which the first counts[e] are used. The grid depends on max_rows or slots only, so both work in a
// graph.
struct ExpertRows {
  const int32_t* offsets = nullptr;  // [n_experts + 1]
  const int32_t* counts = nullptr;   // [n_experts]
  int n_experts, slots = 0;
  int max_rows;  // at least offsets[n_experts]; n_experts * slots
  // Sorted rows that an expert is expected to have, which decides the tile. 0: an equal share of
  // max_rows.
  int usual_rows = 0;
};
// Rows of a tile of the products below, before they are limited by the weights.
int grouped_tile_rows(const ExpertRows& rows);

// Experts in one array, `weight_stride` bytes and `scale_stride` floats apart; `first` is expert 0.
struct ExpertWeights {
  Weight first;
  int64_t weight_stride, scale_stride;
};

// hidden[row] = silu(gate_e x) * (up_e x) in BF16, for the rows of each expert e.
struct GateUpArgs {
  const bf16* x;          // [n_tokens, gate.cols]
  Fp8Rows x_fp8 = {};     // replaces x if not empty
  const int32_t* tokens;  // [max_rows], the row of x for each row
  ExpertRows rows;
  ExpertWeights gate, up;           // equal shapes and scale blocks
  bf16* hidden;                     // [max_rows, hidden_stride], as round_rows() would write it
  int64_t x_stride, hidden_stride;  // multiples of 16
};
void grouped_gate_up(const Stream& stream, const GateUpArgs& args);

// Rounds the output of grouped_gate_up() to FP8, like round_rows_fp8(), for the rows of these
// experts only.
struct RoundHiddenArgs {
  const bf16* hidden;  // [max_rows, hidden_stride]
  ExpertRows rows;
  Fp8Rows out;  // [max_rows]
  int64_t hidden_stride;
  int cols;
};
void round_hidden_fp8(const Stream& stream, const RoundHiddenArgs& args);

// out[row] = down_e hidden[row].
struct GroupedDownArgs {
  const bf16* hidden;       // [max_rows, down.cols]
  Fp8Rows hidden_fp8 = {};  // replaces hidden if not empty
  ExpertRows rows;
  ExpertWeights down;
  float* out;  // [max_rows, down.rows]
  int64_t hidden_stride, out_stride;
};
void grouped_down(const Stream& stream, const GroupedDownArgs& args);

// y[t] (+)= sum of weights[t, i] * rows[row_of[t, i]], in the order of i; negative rows are
// skipped.
struct CombineArgs {
  const float* rows;
  const int32_t* row_of;  // [n_tokens, n_active]
  const float* weights;   // [n_tokens, n_active]
  float* y;               // [n_tokens, cols]
  int64_t row_stride, y_stride;
  int n_tokens, n_active, cols;
  bool add;                    // true: adds to y; false: overwrites y
  int64_t weights_stride = 0;  // between rows of weights; 0: n_active
};
void combine_experts(const Stream& stream, const CombineArgs& args);

}  // namespace tandem::gpu
