// Float products of any weights and shapes: the references for the fast kernels, also used for
// matrices that those do not support. One thread sums each output in the order of the columns.
#pragma once
#include "gpu_kernels/kernels.h"
#include "gpu_kernels/products/weight.h"

namespace tandem::gpu {

// Multiplies head h of every token by its own rows of w, which begin at first_row + h *
// rows_per_head: out[t, h] = x[t, h] w_h^T with out_cols rows of w per head, or, transposed, out[t,
// h] = x[t, h] w_h with x_cols rows. A plain product has one head and all rows.
struct PlainProductArgs {
  Matrix x;  // [tokens * n_heads, x_cols]
  Weight w;
  Matrix out;  // [tokens * n_heads, out_cols]
  int tokens, x_cols, out_cols;
  int n_heads = 1, first_row = 0, rows_per_head = 0;
  bool transposed = false;
};
void plain_product(const Stream& stream, const PlainProductArgs& args);

// The experts of a layer: matrices of expert e are e strides after those of the first.
struct PlainExpertWeights {
  Weight first;
  int64_t bytes_stride, scale_stride;  // bytes of data, floats of scale
};
// y[t] += sum over i of weights[t, i] * down(silu(gate x[t]) * up x[t]) of expert ids[t, i];
// negative ids are skipped.
struct PlainExpertsArgs {
  Matrix x;  // [tokens, dim]
  PlainExpertWeights gate, up, down;
  const int32_t* ids;  // [tokens, n_active], rows ids_stride apart
  int64_t ids_stride;
  Matrix weights;  // [tokens, n_active]
  Matrix hidden;   // [tokens * n_active, expert_dim], scratch
  Matrix y;        // [tokens, dim]
  int tokens, n_active;
};
void plain_experts(const Stream& stream, const PlainExpertsArgs& args);

}  // namespace tandem::gpu
