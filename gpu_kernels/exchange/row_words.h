// Rows in the formats in which they travel (core/row_format.h), as the threads of a block write and
// read them. Bits are those that CPUs have (RowCodec). Threads write words of 4 bytes, so that a
// warp's stores cross a link as full packets.
#pragma once
#include "core/row_format.h"
#include "gpu_kernels/e4m3.h"

namespace tandem::gpu {

// Sizes of floats compare as their bits do, and those of NaN are the largest.
__device__ inline uint32_t size_bits(float v) { return __float_as_uint(v) & 0x7fffffff; }

// The warps of a block take turns: each lane has four of the 128 columns of a scale.
__device__ inline void write_fp8_row(const float* x, int dim, std::byte* to) {
  constexpr int kEach = kColumnsOfRowScale / 32;
  auto* const codes = reinterpret_cast<uint32_t*>(to);
  auto* const scales = reinterpret_cast<float*>(to + row_scales_begin(dim));
  const int lane = threadIdx.x % 32, n_warps = blockDim.x / 32;
  for (int block = threadIdx.x / 32; block * kColumnsOfRowScale < dim; block += n_warps) {
    const int first = block * kColumnsOfRowScale + lane * kEach;
    float v[kEach];
    uint32_t size = 0;
    for (int i = 0; i < kEach; ++i) {
      v[i] = first + i < dim ? x[first + i] : 0;
      size = max(size, size_bits(v[i]));
    }
    for (int distance = 16; distance > 0; distance /= 2)
      size = max(size, __shfl_xor_sync(~0u, size, distance));
    const float largest = __uint_as_float(size);
    const float inverse = largest > 0 ? 448 / largest : 0;
    uint32_t word = 0;
    for (int i = 0; i < kEach; ++i) word |= to_e4m3(v[i] * inverse) << 8 * i;
    if (first < dim) codes[first / kEach] = word;
    if (lane == 0) scales[block] = largest / 448;
  }
}

// x: [dim]. to: [encoded_bytes()], at whole 4 bytes.
__device__ inline void write_row(RowFormat format, const float* x, int dim, std::byte* to) {
  if (format == RowFormat::kFp8) return write_fp8_row(x, dim, to);
  if (format == RowFormat::kBf16) {
    auto* const out = reinterpret_cast<uint32_t*>(to);
    for (int c = 2 * threadIdx.x; c < dim; c += 2 * blockDim.x)
      out[c / 2] = pack_bf16(x[c], c + 1 < dim ? x[c + 1] : 0);
    return;
  }
  auto* const out = reinterpret_cast<float*>(to);
  for (int c = threadIdx.x; c < dim; c += blockDim.x) out[c] = x[c];
}

// The number in column c of a row.
__device__ inline float column_of_row(RowFormat format, const std::byte* row, int dim, int c) {
  if (format == RowFormat::kF32) return reinterpret_cast<const float*>(row)[c];
  if (format == RowFormat::kBf16) return to_float(reinterpret_cast<const bf16*>(row)[c]);
  const float scale =
      reinterpret_cast<const float*>(row + row_scales_begin(dim))[c / kColumnsOfRowScale];
  return to_float(reinterpret_cast<const fp8_e4m3*>(row)[c]) * scale;
}

}  // namespace tandem::gpu
