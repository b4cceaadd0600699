#include "device.h"
#include "gpu_kernels/products/plain_products.h"

namespace tandem::gpu {
namespace {

constexpr int kThreads = 64;

__device__ float number(const Weight& w, int64_t row, int64_t column) {
  const int64_t at = row * w.stride + column;
  if (w.type == Number::kF32) return static_cast<const float*>(w.data)[at];
  if (w.type == Number::kBF16) return to_float(static_cast<const bf16*>(w.data)[at]);
  return to_float(static_cast<const fp8_e4m3*>(w.data)[at]) *
         w.scale[(w.row0 + row) / w.block_rows * w.scale_stride + column / w.block_cols];
}

__device__ float dot(const float* x, const Weight& w, int64_t row) {
  float sum = 0;
  for (int i = 0; i < w.cols; ++i) sum += x[i] * number(w, row, i);
  return sum;
}

// blockIdx.x indexes output columns, blockIdx.y rows.
__device__ int column_of_thread() { return static_cast<int>(blockIdx.x * kThreads + threadIdx.x); }

__global__ void product_kernel(const __grid_constant__ PlainProductArgs a) {
  const int column = column_of_thread();
  if (column >= a.out_cols) return;
  for (int row = blockIdx.y; row < a.tokens * a.n_heads; row += gridDim.y) {
    const float* x = a.x.data + row * a.x.stride;
    const int64_t first = a.first_row + int64_t{row % a.n_heads} * a.rows_per_head;
    float sum = 0;
    if (a.transposed) {
      for (int i = 0; i < a.x_cols; ++i) sum += x[i] * number(a.w, first + i, column);
    } else {
      sum = dot(x, a.w, first + column);
    }
    a.out.data[row * a.out.stride + column] = sum;
  }
}

__device__ Weight of_expert(const PlainExpertWeights& w, int64_t expert) {
  Weight own = w.first;
  own.data = static_cast<const uint8_t*>(own.data) + expert * w.bytes_stride;
  if (own.scale) own.scale += expert * w.scale_stride;
  return own;
}

__global__ void gate_up_kernel(const __grid_constant__ PlainExpertsArgs a) {
  const int column = column_of_thread();
  if (column >= a.gate.first.rows) return;
  for (int pair = blockIdx.y; pair < a.tokens * a.n_active; pair += gridDim.y) {
    const int token = pair / a.n_active;
    const int expert = a.ids[token * a.ids_stride + pair % a.n_active];
    if (expert < 0) continue;
    const float* x = a.x.data + token * a.x.stride;
    const float gate = dot(x, of_expert(a.gate, expert), column);
    const float up = dot(x, of_expert(a.up, expert), column);
    a.hidden.data[pair * a.hidden.stride + column] = gate / (1 + expf(-gate)) * up;
  }
}

__global__ void down_kernel(const __grid_constant__ PlainExpertsArgs a) {
  const int column = column_of_thread();
  if (column >= a.down.first.rows) return;
  for (int token = blockIdx.y; token < a.tokens; token += gridDim.y) {
    float sum = 0;
    for (int i = 0; i < a.n_active; ++i) {
      const float* hidden = a.hidden.data + (int64_t{token} * a.n_active + i) * a.hidden.stride;
      const int expert = a.ids[token * a.ids_stride + i];
      if (expert < 0) continue;
      const Weight down = of_expert(a.down, expert);
      sum += a.weights.data[token * a.weights.stride + i] * dot(hidden, down, column);
    }
    a.y.data[token * a.y.stride + column] += sum;
  }
}

LaunchShape shape_for(int rows, int cols) {
  return {.grid_x = (cols + kThreads - 1) / kThreads,
          .grid_y = min(rows, kMaxGridYz),
          .threads = kThreads};
}

}  // namespace

void plain_product(const Stream& stream, const PlainProductArgs& a) {
  if (a.tokens > 0) launch(product_kernel, shape_for(a.tokens * a.n_heads, a.out_cols), stream, a);
}

void plain_experts(const Stream& stream, const PlainExpertsArgs& a) {
  if (a.tokens == 0) return;
  launch(gate_up_kernel, shape_for(a.tokens * a.n_active, a.gate.first.rows), stream, a);
  launch(down_kernel, shape_for(a.tokens, a.down.first.rows), stream, a);
}

}  // namespace tandem::gpu
