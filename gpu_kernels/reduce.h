// What the lanes of a warp, the threads of a block and the blocks of a grid find together, for
// kernels.
#pragma once
#include "device.h"
#include "packed.h"

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

// For all threads of each of n_blocks blocks that share a result and a counter, which is 0 before
// and after: true in the last block, which sees what the others have written. `last` is in shared
// memory.
__device__ inline bool is_last_block(uint32_t* counter, unsigned n_blocks, bool& last) {
  __syncthreads();
  if (threadIdx.x == 0) {
    last = arrive(counter) + 1 == n_blocks;
    if (last) *counter = 0;
  }
  __syncthreads();
  return last;
}

}  // namespace tandem::gpu
