// The float product of 4 rows of w with 8 tokens, for a block of 8 warps. The warps share the
// columns, 4 per lane.
#pragma once
#include "device.h"
#include "gpu_kernels/products/products.h"

namespace tandem::gpu::exact {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kRows = 4, kTokens = 8;
constexpr int kColumns = kThreads * 4;  // that a block reads at a time

static_assert(kRows * kTokens == 32);  // one sum per lane of a warp

struct Shared {
  float sum[kWarps][kRows * kTokens];
};

// Each lane has 32 numbers; lane i gets the sum of number i over all lanes. Every exchange halves
// the remaining numbers: 31 exchanges instead of 5 per number.
__device__ inline float sum_over_lanes(float (&v)[32], int lane) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) {
    const bool upper = lane & d;
#pragma unroll
    for (int i = 0; i < d; ++i) {
      const float given = upper ? v[i] : v[i + d];
      v[i] = (upper ? v[i + d] : v[i]) + __shfl_xor_sync(~0u, given, d);
    }
  }
  return v[0];
}

// Columns column to column + 3 of a row of w; past the last column, reads end within its 16 bytes.
template <Number kType>
__device__ float4 decode(const Weight& w, int64_t row, int column) {
  constexpr int kBytes = bytes_of(kType);
  const uint8_t* p = static_cast<const uint8_t*>(w.data) + (row * w.stride + column) * kBytes;
  if constexpr (kType == Number::kF32) return *reinterpret_cast<const float4*>(p);
  if constexpr (kType == Number::kBF16) {
    const uint2 v = *reinterpret_cast<const uint2*>(p);
    const auto half = [](uint32_t bits) { return to_float(bf16{static_cast<uint16_t>(bits)}); };
    return {half(v.x), half(v.x >> 16), half(v.y), half(v.y >> 16)};
  }
  const uint32_t v = *reinterpret_cast<const uint32_t*>(p);
  const auto code = [&](int i) { return to_float(fp8_e4m3{static_cast<uint8_t>(v >> 8 * i)}); };
  const float scale =
      w.scale[(w.row0 + row) / w.block_rows * w.scale_stride + column / w.block_cols];
  return {code(0) * scale, code(1) * scale, code(2) * scale, code(3) * scale};
}

__device__ inline float4 load_x(const ExactArgs& a, int64_t token, int column, bool aligned) {
  const float* x = a.x + token * a.x_stride + column;
  const int n = a.w.cols - column;
  if (aligned && n >= 4) return *reinterpret_cast<const float4*>(x);
  return {x[0], n > 1 ? x[1] : 0, n > 2 ? x[2] : 0, n > 3 ? x[3] : 0};
}

// Sums over columns [begin, end), begin a multiple of 4. Lane i of warp 0 gets the one of row
// first_row + i / kTokens and token first_token + i % kTokens, undefined where either is missing.
template <Number kType>
__device__ float sums_of_block(const ExactArgs& a, int first_row, int first_token, int begin,
                               int end, Shared& s) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool aligned = (reinterpret_cast<uintptr_t>(a.x) | a.x_stride * 4) % 16 == 0;
  float sum[kRows * kTokens] = {};
#pragma unroll 2
  for (int column = begin + threadIdx.x * 4; column < end; column += kColumns) {
    float4 w[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      w[r] = decode<kType>(a.w, min(first_row + r, a.w.rows - 1), column);
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (first_token + t >= a.n_tokens) continue;
      const float4 x = load_x(a, first_token + t, column, aligned);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float& to = sum[r * kTokens + t];
        to = fmaf(x.w, w[r].w, fmaf(x.z, w[r].z, fmaf(x.y, w[r].y, fmaf(x.x, w[r].x, to))));
      }
    }
  }
  s.sum[warp][lane] = sum_over_lanes(sum, lane);
  __syncthreads();
  float total = 0;
  for (int i = 0; i < kWarps; ++i) total += s.sum[i][lane];
  return total;
}

}  // namespace tandem::gpu::exact
