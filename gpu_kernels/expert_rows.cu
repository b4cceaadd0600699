// Rounding of product inputs to BF16, and the weighted sum of expert outputs.
#include "device.h"
#include "gpu_kernels/products/products.h"
#include "packed.h"

namespace tandem::gpu {
namespace {

constexpr int kThreads = 256;

// Each thread rounds 16 columns.
__global__ void __launch_bounds__(kThreads) round_kernel(const __grid_constant__ RoundArgs a) {
  const int64_t per_row = a.out_stride / 16, at = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= a.n_rows * per_row) return;
  const int64_t row = at / per_row;
  const int column = static_cast<int>(at % per_row) * 16;
  const float* x = a.x + row * a.x_stride + column;
  alignas(16) float v[16] = {};
  if (column + 16 <= a.cols && reinterpret_cast<uintptr_t>(x) % 16 == 0) {
#pragma unroll
    for (int i = 0; i < 16; i += 4)
      *reinterpret_cast<float4*>(v + i) = *reinterpret_cast<const float4*>(x + i);
  } else {
#pragma unroll
    for (int i = 0; i < 16; ++i)
      if (column + i < a.cols) v[i] = x[i];
  }
  auto* const out = reinterpret_cast<uint4*>(a.out + row * a.out_stride + column);
  out[0] = {pack_bf16(v[0], v[1]), pack_bf16(v[4], v[5]), pack_bf16(v[8], v[9]),
            pack_bf16(v[12], v[13])};
  out[1] = {pack_bf16(v[2], v[3]), pack_bf16(v[6], v[7]), pack_bf16(v[10], v[11]),
            pack_bf16(v[14], v[15])};
}

// Each thread sums one column of one token.
__global__ void __launch_bounds__(kThreads) combine_kernel(const __grid_constant__ CombineArgs a) {
  const int column = blockIdx.x * kThreads + threadIdx.x;
  const int64_t token = blockIdx.y;
  if (column >= a.cols) return;
  float* y = a.y + token * a.y_stride + column;
  float sum = a.add ? *y : 0;
#pragma unroll 4
  for (int i = 0; i < a.n_active; ++i) {
    const int32_t row = a.row_of[token * a.n_active + i];
    if (row >= 0)
      sum += a.weights[token * a.weights_stride + i] * a.rows[row * a.row_stride + column];
  }
  *y = sum;
}

}  // namespace

void round_rows(const Stream& stream, const RoundArgs& a) {
  const int64_t n = a.n_rows * (a.out_stride / 16);
  launch(round_kernel,
         {.grid_x = static_cast<int>((n + kThreads - 1) / kThreads), .threads = kThreads}, stream,
         a);
}

void combine_experts(const Stream& stream, const CombineArgs& a) {
  for (int first = 0; first < a.n_tokens; first += kMaxGridYz) {
    CombineArgs part = a;
    if (part.weights_stride == 0) part.weights_stride = a.n_active;
    part.row_of += int64_t{first} * a.n_active;
    part.weights += first * part.weights_stride;
    part.y += first * a.y_stride;
    part.n_tokens = min(a.n_tokens - first, kMaxGridYz);
    launch(combine_kernel,
           {.grid_x = (a.cols + kThreads - 1) / kThreads,
            .grid_y = part.n_tokens,
            .threads = kThreads},
           stream, part);
  }
}

}  // namespace tandem::gpu
