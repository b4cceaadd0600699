// Signals within kernels: blocks that await one, and a last block that raises one. Buffers begin
// with all bits set, so counts are stored less one.
#pragma once
#include "device.h"
#include "gpu_kernels/exchange/signals.h"

namespace tandem::gpu {

// For one thread of every block: returns when the next raise is there.
__device__ inline void await_raise(const SignalWords& s) {
  const uint32_t n = *s.count + 1;
  while (static_cast<int32_t>(load_acquire(s.word) - n) < 0) {
  }
}

// For one thread of every block, after a barrier behind the block's work. True for the last of
// n_blocks blocks, once a launch.
__device__ inline bool ends_last(const SignalWords& s, uint32_t n_blocks) {
  if (add_acq_rel(s.arrived, 1) + 2 != n_blocks) return false;
  *s.arrived = ~0u;
  return true;
}

// For the last block: what every block wrote is visible to who sees the raise.
__device__ inline void raise(const SignalWords& s) {
  const uint32_t n = *s.count + 1;
  *s.count = n;
  store_release(s.word, n);
}

// For the last block of a kernel whose blocks have awaited a raise.
__device__ inline void count_await(const SignalWords& s) { ++*s.count; }

}  // namespace tandem::gpu
