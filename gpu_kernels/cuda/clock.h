// Clocks of the GPU.
#pragma once
#include <cstdint>

namespace tandem::gpu {

__device__ inline uint64_t nanoseconds() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

// The clock of this multiprocessor.
__device__ inline int64_t cycles() {
  int64_t t;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(t));
  return t;
}

}  // namespace tandem::gpu
