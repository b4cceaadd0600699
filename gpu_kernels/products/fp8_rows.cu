// Rounding of activations to FP8: eight threads share the 128 columns of a scale.
#include "device.h"
#include "gpu_kernels/e4m3.h"
#include "gpu_kernels/products/products.h"
#include "packed.h"

namespace tandem::gpu {
namespace {

constexpr int kThreads = 256, kEach = 16, kThreadsOfBlock = kFp8Block / kEach;

struct Place {
  int64_t row;
  int column;
};

__device__ Place place_of_thread(int cols) {
  const int64_t per_row = (cols + kFp8Block - 1) / kFp8Block * kThreadsOfBlock;
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  return {at / per_row, static_cast<int>(at % per_row) * kEach};
}

// All lanes of a warp must call it; v is 0 beyond the data.
__device__ void store_rounded(const float (&v)[kEach], Place at, bool exists, int cols,
                              const Fp8Rows& out) {
  float largest = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) largest = fmaxf(largest, e4m3_magnitude(v[i]));
#pragma unroll
  for (int distance = kThreadsOfBlock / 2; distance > 0; distance /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
  const float scale = e4m3_scale(largest);
  if (!exists) return;
  if (at.column % kFp8Block == 0)
    out.scales[at.row * out.scale_stride + at.column / kFp8Block] = scale;
  if (at.column >= cols) return;
  uint32_t codes[kEach / 4] = {};
#pragma unroll
  for (int i = 0; i < kEach; ++i) codes[i / 4] |= to_e4m3(v[i], scale) << i % 4 * 8;
  *reinterpret_cast<uint4*>(out.codes + at.row * out.stride + at.column) = {codes[0], codes[1],
                                                                            codes[2], codes[3]};
}

__global__ void __launch_bounds__(kThreads)
    round_fp8_kernel(const __grid_constant__ RoundFp8Args a) {
  const Place at = place_of_thread(a.cols);
  const bool exists = at.row < a.n_rows;
  const float* const x = a.x + at.row * a.x_stride + at.column;
  alignas(16) float v[kEach] = {};
  if (exists && at.column + kEach <= a.cols && reinterpret_cast<uintptr_t>(x) % 16 == 0) {
#pragma unroll
    for (int i = 0; i < kEach; i += 4)
      *reinterpret_cast<float4*>(v + i) = *reinterpret_cast<const float4*>(x + i);
  } else if (exists) {
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (at.column + i < a.cols) v[i] = x[i];
  }
  store_rounded(v, at, exists, a.cols, a.out);
}

__device__ bool has_row(const ExpertRows& rows, int64_t row) {
  if (row >= rows.max_rows) return false;
  if (rows.slots > 0) return row % rows.slots < rows.counts[row / rows.slots];
  return row >= rows.offsets[0] && row < rows.offsets[rows.n_experts];
}

__global__ void __launch_bounds__(kThreads)
    round_hidden_kernel(const __grid_constant__ RoundHiddenArgs a) {
  const Place at = place_of_thread(a.cols);
  const bool exists = has_row(a.rows, at.row);
  float v[kEach] = {};
  if (exists && at.column < a.cols) {
    const auto* from =
        reinterpret_cast<const uint4*>(a.hidden + at.row * a.hidden_stride + at.column);
    const uint4 half[2] = {from[0], from[1]};
    const uint32_t pairs[kEach / 2] = {half[0].x, half[0].y, half[0].z, half[0].w,
                                       half[1].x, half[1].y, half[1].z, half[1].w};
#pragma unroll
    for (int i = 0; i < kEach; i += 2) {
      const uint32_t pair = pairs[product_column(i) / 2];
      v[i] = bf16_low(pair);
      v[i + 1] = bf16_high(pair);
    }
  }
  store_rounded(v, at, exists, a.cols, a.out);
}

int blocks_for(int64_t rows, int cols) {
  const int64_t threads = rows * ((cols + kFp8Block - 1) / kFp8Block) * kThreadsOfBlock;
  return static_cast<int>((threads + kThreads - 1) / kThreads);
}

}  // namespace

void round_rows_fp8(const Stream& stream, const RoundFp8Args& a) {
  launch(round_fp8_kernel, {.grid_x = blocks_for(a.n_rows, a.cols), .threads = kThreads}, stream,
         a);
}

void round_hidden_fp8(const Stream& stream, const RoundHiddenArgs& a) {
  launch(round_hidden_kernel, {.grid_x = blocks_for(a.rows.max_rows, a.cols), .threads = kThreads},
         stream, a);
}

}  // namespace tandem::gpu
