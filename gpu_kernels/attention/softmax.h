// Softmax and key loading shared by both attention kernels.
#pragma once
#include "packed.h"

namespace tandem::gpu {

constexpr float kLog2E = 1.4426950408889634f;  // all exponentials are powers of two

// Maximum and sum of 2^(score - maximum) so far.
struct RunningSoftmax {
  float max = -INFINITY, sum = 0;
};

// The number to subtract from scores before exponentiation: 0 where all are -inf, so that they
// yield 0.
__device__ inline float finite_max(float max) { return max == -INFINITY ? 0 : max; }

// Copies eight numbers to shared memory, visible after cp_async_wait and a barrier; zeros from
// n_valid on.
__device__ inline void copy_8(bf16* to, const bf16* from, int n_valid) {
  if (n_valid <= 0 || (n_valid >= 8 && reinterpret_cast<uintptr_t>(from) % 16 == 0)) {
    cp_async_16(to, n_valid > 0 ? from : nullptr, n_valid > 0);
  } else {
    for (int i = 0; i < 8; ++i) to[i] = i < n_valid ? from[i] : bf16{0};
  }
}

}  // namespace tandem::gpu
