// A row of an FP8 cache, for kernels of kFp8RowThreads threads a token: one warp for each 128
// latents.
#pragma once
#include "device.h"
#include "gpu_kernels/attention/attention.h"
#include "gpu_kernels/e4m3.h"
#include "gpu_kernels/reduce.h"

namespace tandem::gpu {

constexpr int kFp8RowThreads = kMaxKvRank / 4, kMaxFp8Rope = kMaxCacheDim - kMaxKvRank;

// Writes latents 4 threadIdx.x to 4 threadIdx.x + 3, all threads those of a row.
__device__ inline void store_fp8_latents(const float (&v)[4], uint8_t* row) {
  float largest = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) largest = fmaxf(largest, e4m3_magnitude(v[i]));
  const float scale = e4m3_scale(warp_max(largest));
  uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) codes |= to_e4m3(v[i], scale) << 8 * i;
  reinterpret_cast<uint32_t*>(row)[threadIdx.x] = codes;
  if (threadIdx.x % 32 == 0) reinterpret_cast<float*>(row + kMaxKvRank)[threadIdx.x / 32] = scale;
}

// The key of a row, kMaxFp8Rope numbers.
__device__ inline bf16* fp8_row_key(uint8_t* row) {
  return reinterpret_cast<bf16*>(row + kMaxKvRank + kMaxKvRank / 128 * 4);
}

}  // namespace tandem::gpu
