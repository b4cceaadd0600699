// Products of activations with weights that stay in FP8 or BF16 on the card: launchers only,
// nothing is allocated. Every pointer is device memory. FP8 weights contain no NaN, and a block of
// their scales has a multiple of 64 columns (of 128 in per_head_product(), any multiple of 4 in
// exact_product()). docs/gpu_kernels.md says why each is as it is.
#pragma once
#include "gpu_kernels/runtime.h"
#include "gpu_kernels/weight.h"

namespace tandem::gpu {

// The last of several blocks that share an output adds their parts, always in the same order.
struct Workspace {
  float* partial;      // scratch; each launcher says how many
  uint32_t* counters;  // kCounters; 0 before, and again afterwards
};
constexpr int kCounters = 4096;

// out = x w^T for 1 to 16 tokens, at the speed of reading w (FP8 or BF16). Of x, BF16 is used.
constexpr int kSkinnyTokens = 16;
struct SkinnyArgs {
  const float* x;  // [n_tokens, w.cols]
  Weight w;
  float* out;  // [n_tokens, w.rows]
  int64_t x_stride, out_stride;
  int n_tokens;
  Workspace workspace;
  int n_multiprocessors;  // of the card: decides how often columns are split
};
void skinny_product(const Stream& stream, const SkinnyArgs& args);
// Floats of Workspace::partial.
int64_t skinny_partials(const Weight& w, int n_tokens, int n_multiprocessors);

// out = x w^T with nothing rounded: float activations, weights decoded to float, any type, any
// scale blocks, any number of tokens. For routers, and what the others do not take.
struct ExactArgs {
  const float* x;  // [n_tokens, w.cols]
  Weight w;
  float* out;  // [n_tokens, w.rows]
  int64_t x_stride, out_stride;
  int n_tokens;
};
void exact_product(const Stream& stream, const ExactArgs& args);

// Each head has rows of its own in w (FP8 or BF16), from first_row + head * rows_per_head on:
// out[t, h] = x[t, h] w_h^T with out_cols rows of w a head or, transposed, x[t, h] w_h with x_cols
// rows. Any number of tokens. Row t * n_heads + h of x and out belongs to head h. Of x, BF16 is
// used; transposed, of x times the scale of w.
struct PerHeadArgs {
  const float* x;  // [n_tokens * n_heads, x_cols]
  Weight w;        // cols == x_cols, or out_cols where transposed
  float* out;      // [n_tokens * n_heads, out_cols]
  int64_t x_stride, out_stride;
  int n_tokens, n_heads, x_cols, out_cols, first_row, rows_per_head;
  bool transposed;
};
void per_head_product(const Stream& stream, const PerHeadArgs& args);

// Where products of many tokens have a column of x: lanes of tensor cores take 4 columns of FP8 at
// a time, and so columns 4 t, 4 t + 1 of every 16 come first, 4 t + 2, 4 t + 3 in their second
// half.
constexpr int product_column(int column) {
  return column / 16 * 16 + column / 2 % 2 * 8 + column % 16 / 4 * 2 + column % 2;
}

// Columns that such rows of x have in memory, zeros behind the last.
constexpr int64_t product_stride(int64_t cols) { return (cols + 15) / 16 * 16; }

// BF16 copies of float rows in the order of product_column(), filled up with zeros to out_stride.
struct RoundArgs {
  const float* x;                // [n_rows, cols]
  bf16* out;                     // [n_rows, out_stride]
  int64_t x_stride, out_stride;  // out_stride: product_stride() of cols
  int64_t n_rows;
  int cols;
};
void round_rows(const Stream& stream, const RoundArgs& args);

// Rows in FP8 with their columns in order: value[r][c] = codes[r * stride + c] * scales[r *
// scale_stride + c / 128].
struct Fp8Rows {
  fp8_e4m3* codes = nullptr;  // [n_rows, stride]; null: there are none
  float* scales = nullptr;    // [n_rows, scale_stride]
  int64_t stride = 0, scale_stride = 0;
};
constexpr int kFp8Block = 128;  // columns of a scale

// FP8 copies of float rows, filled up with zeros to the next multiple of 16 columns; out.stride is
// one. As act_quant() of DeepSeek-V3's inference/kernel.py: the largest of a block becomes 448. A
// block of zeros stays so, one with a number that is not finite becomes NaN.
struct RoundFp8Args {
  const float* x;  // [n_rows, cols]
  Fp8Rows out;
  int64_t x_stride, n_rows;
  int cols;
};
void round_rows_fp8(const Stream& stream, const RoundFp8Args& args);

// Whether products take their x in FP8 with these weights, on a card with Card::fp8_mma.
inline bool takes_fp8_rows(const Weight& w) {
  return w.type == Number::kF8E4M3 && w.scale && w.block_cols == kFp8Block;
}

// out = x w^T for many tokens on tensor cores; w FP8 (decoded to BF16 in registers, exactly) or
// BF16; or FP8 with x in FP8 too, where mma sums blocks of 128 columns (on a card with fewer bits
// than a float has), which floats add up.
struct MatrixArgs {
  const bf16* x;       // [n_tokens, w.cols], as round_rows() leaves it
  Fp8Rows x_fp8 = {};  // takes the place of x if it is there; takes_fp8_rows(w)
  Weight w;
  float* out;               // [n_tokens, w.rows]
  bf16* rounded = nullptr;  // takes the place of out if that is null; columns are then not shared
  int64_t x_stride, out_stride;
  int n_tokens;
  Workspace workspace;  // matrix_partials() floats
  int n_multiprocessors = 0;
};
void matrix_product(const Stream& stream, const MatrixArgs& args);
int64_t matrix_partials(const Weight& w, int n_tokens, int n_multiprocessors);

// Which rows belong to which expert. Either `slots` is 0 and rows are sorted by expert, expert e
// has rows offsets[e] to offsets[e + 1]; or each expert has `slots` rows of its own, from e * slots
// on, of which the first counts[e] are used. The grid depends on max_rows or slots only, so both
// fit a graph.
struct ExpertRows {
  const int32_t* offsets = nullptr;  // [n_experts + 1]
  const int32_t* counts = nullptr;   // [n_experts]
  int n_experts, slots = 0;
  int max_rows;  // at least offsets[n_experts]; n_experts * slots
};

// Experts lie one after the other, `weight_stride` bytes and `scale_stride` floats apart; `first`
// is the first of them.
struct ExpertWeights {
  Weight first;
  int64_t weight_stride, scale_stride;
};

// hidden[row] = silu(gate_e x) * (up_e x) in BF16, for the rows of each expert e.
struct GateUpArgs {
  const bf16* x;          // [n_tokens, gate.cols]
  Fp8Rows x_fp8 = {};     // or in its place
  const int32_t* tokens;  // [max_rows], the row of x that each row uses
  ExpertRows rows;
  ExpertWeights gate, up;           // equal shapes and scale blocks
  bf16* hidden;                     // [max_rows, hidden_stride], as round_rows() would leave it
  int64_t x_stride, hidden_stride;  // multiples of 16
};
void grouped_gate_up(const Stream& stream, const GateUpArgs& args);

// FP8 copies of what grouped_gate_up() left, of the rows of these experts only, as
// round_rows_fp8() makes them.
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
  Fp8Rows hidden_fp8 = {};  // or in its place
  ExpertRows rows;
  ExpertWeights down;
  float* out;  // [max_rows, down.rows]
  int64_t hidden_stride, out_stride;
};
void grouped_down(const Stream& stream, const GroupedDownArgs& args);

// y[t] (+)= sum of weights[t, i] * rows[row_of[t, i]], in the order of i; a negative row is left
// out.
struct CombineArgs {
  const float* rows;
  const int32_t* row_of;  // [n_tokens, n_active]
  const float* weights;   // [n_tokens, n_active]
  float* y;               // [n_tokens, cols]
  int64_t row_stride, y_stride;
  int n_tokens, n_active, cols;
  bool add;  // to what y holds
};
void combine_experts(const Stream& stream, const CombineArgs& args);

}  // namespace tandem::gpu
