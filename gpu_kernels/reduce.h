// Sums over a warp and over a block, for kernels.
#pragma once
#include "device.h"

namespace tandem::gpu {

// Every lane gets the sum.
__device__ inline float warp_sum(float v) {
  for (int distance = 16; distance > 0; distance /= 2) v += __shfl_xor_sync(~0u, v, distance);
  return v;
}

__device__ inline float warp_max(float v) {
  for (int distance = 16; distance > 0; distance /= 2)
    v = fmaxf(v, __shfl_xor_sync(~0u, v, distance));
  return v;
}

struct BlockSums {
  float of_warp[32];
};

// Every thread gets the sum, in a fixed order of additions. `s` may be reused after a barrier.
template <int kThreads>
__device__ float block_sum(float v, BlockSums& s) {
  v = warp_sum(v);
  if (threadIdx.x % 32 == 0) s.of_warp[threadIdx.x / 32] = v;
  __syncthreads();
  float sum = 0;
  for (int warp = 0; warp < kThreads / 32; ++warp) sum += s.of_warp[warp];
  return sum;
}

}  // namespace tandem::gpu
