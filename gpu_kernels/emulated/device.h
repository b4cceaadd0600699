// CUDA C++ for g++: the subset that the kernels use, with the names of cuda/device.h. A thread runs
// alone until its next synchronisation (barrier, warp collective, load_acquire), where emulator.cpp
// switches.
#pragma once
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <source_location>
#include <type_traits>

#include "gpu_kernels/emulated/emulator.h"
#include "gpu_kernels/numbers.h"

// CUDA keywords. `extern __shared__` does not compile on purpose: use shared_memory<T>().
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static thread_local

// CUDA code reinterprets memory through these types, hence may_alias.
struct uint3 {
  unsigned x, y, z;
};
using dim3 = uint3;
struct [[gnu::may_alias]] alignas(8) uint2 {
  unsigned x, y;
};
struct [[gnu::may_alias]] alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct [[gnu::may_alias]] alignas(8) float2 {
  float x, y;
};
struct [[gnu::may_alias]] alignas(16) float4 {
  float x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

extern constinit thread_local uint3 threadIdx, blockIdx;
extern constinit thread_local dim3 blockDim, gridDim;
constexpr int warpSize = 32;

namespace tandem::gpu::emulated {

inline int lane() { return threadIdx.x % 32; }

// Passes a value to the other lanes of `mask`; returns the packets of all 32.
template <class T>
const Packet* exchange(unsigned mask, const T& mine, Where at) {
  static_assert(sizeof(T) <= sizeof(Packet));
  std::memcpy(join(mask, at).word, &mine, sizeof(T));
  return meet(false);
}

// Reads are hidden from ThreadSanitizer: collectives exchange values without ordering memory.
template <class T>
__attribute__((no_sanitize("thread"))) T shuffle(unsigned mask, const T& value, int source,
                                                 Where at) {
  const Packet* all = exchange(mask, value, at);
  if (!(mask >> source & 1)) fault("shuffle reads a lane outside its mask", at);
  T out;
  __builtin_memcpy(&out, all[source].word, sizeof(T));
  return out;
}

}  // namespace tandem::gpu::emulated

inline void __syncthreads(std::source_location at = std::source_location::current()) {
  tandem::gpu::emulated::sync_block(at);
}
inline void __syncwarp(unsigned mask = ~0u,
                       std::source_location at = std::source_location::current()) {
  tandem::gpu::emulated::join(mask, at);
  tandem::gpu::emulated::meet(true);
}

template <class T>
T __shfl_sync(unsigned mask, T v, int source, int width = 32,
              std::source_location at = std::source_location::current()) {
  const int lane = tandem::gpu::emulated::lane(), base = lane & ~(width - 1);
  return tandem::gpu::emulated::shuffle(mask, v, base + (source & (width - 1)), at);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T v, int lane_mask, int width = 32,
                  std::source_location at = std::source_location::current()) {
  const int lane = tandem::gpu::emulated::lane(), source = lane ^ lane_mask;
  return tandem::gpu::emulated::shuffle(mask, v, source < (lane | (width - 1)) + 1 ? source : lane,
                                        at);
}
template <class T>
T __shfl_down_sync(unsigned mask, T v, int delta, int width = 32,
                   std::source_location at = std::source_location::current()) {
  const int lane = tandem::gpu::emulated::lane(), source = lane + delta;
  return tandem::gpu::emulated::shuffle(mask, v, source <= (lane | (width - 1)) ? source : lane,
                                        at);
}
__attribute__((no_sanitize("thread"))) inline unsigned __ballot_sync(
    unsigned mask, bool predicate, std::source_location at = std::source_location::current()) {
  using namespace tandem::gpu::emulated;
  const Packet* all = exchange(mask, unsigned{predicate}, at);
  unsigned bits = 0;
  for (int i = 0; i < 32; ++i) bits |= (mask >> i & all[i].word[0]) << i;
  return bits;
}

// Stronger than the GPU's relaxed order, so a missing __threadfence() goes unnoticed here.
template <class T>
T atomicAdd(T* p, std::type_identity_t<T> v) {
  return std::atomic_ref<T>(*p).fetch_add(v);
}
template <class T>
T atomicExch(T* p, std::type_identity_t<T> v) {
  return std::atomic_ref<T>(*p).exchange(v);
}
template <class T>
T atomicCAS(T* p, std::type_identity_t<T> expected, std::type_identity_t<T> v) {
  std::atomic_ref<T>(*p).compare_exchange_strong(expected, v);
  return expected;
}
template <class T>
T atomicMax(T* p, std::type_identity_t<T> v) {
  T old = std::atomic_ref<T>(*p).load();
  while (old < v && !std::atomic_ref<T>(*p).compare_exchange_weak(old, v)) {
  }
  return old;
}
inline void __threadfence() {}
inline void __threadfence_system() {}

template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
constexpr T min(T a, std::type_identity_t<T> b) {
  return b < a ? b : a;
}
template <class T>
constexpr T max(T a, std::type_identity_t<T> b) {
  return a < b ? b : a;
}
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline unsigned __float_as_uint(float v) { return std::bit_cast<unsigned>(v); }
inline float __uint_as_float(unsigned v) { return std::bit_cast<float>(v); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }

namespace tandem::gpu {

template <class Args>
void launch(void (*kernel)(Args), const LaunchShape& shape, const Stream& stream,
            const std::type_identity_t<Args>& args, Caller at = Caller::here()) {
  const emulated::InDriver driver;
  emulated::check_shape(shape, at);
  emulated::enqueue_kernel(stream, shape, [=, n_at_ends = emulated::blocks_option()] {
    emulated::run_grid(shape, n_at_ends, [&] { kernel(args); });
  });
}

inline void begin_early() { emulated::begin_early(); }

template <class T>
T& shared_memory(std::source_location at = std::source_location::current()) {
  return *static_cast<T*>(emulated::shared_memory(sizeof(T), at));
}

inline float to_float(bf16 v) { return widen(v); }
inline bf16 to_bf16(float v) { return narrow(v); }
inline float to_float(fp8_e4m3 v) { return widen(v); }

inline void cp_async_16(void* to, const void* from, bool valid,
                        std::source_location at = std::source_location::current()) {
  emulated::check_shared(to, 16, 16, at);
  if (reinterpret_cast<uintptr_t>(from) % 16) emulated::fault("cp.async source misaligned", at);
  std::memset(to, 0xff, 16);
  emulated::push_copy({to, valid ? from : nullptr, 0});
}
inline void cp_async_commit() { emulated::close_group(); }
template <int kPending>
void cp_async_wait() {
  for (emulated::PendingCopy c; emulated::pop_copy(kPending, c);) {
    if (c.from)
      std::memcpy(c.to, c.from, 16);
    else
      std::memset(c.to, 0, 16);
  }
}

namespace emulated {

__attribute__((no_sanitize("thread"))) inline void load_matrices(uint32_t (&out)[4],
                                                                 const bf16* row, bool transposed,
                                                                 Where at) {
  check_shared(row, 16, 16, at);
  const int l = lane();
  const Packet* all = exchange(~0u, row, at);
  const bf16* rows[4][2];  // start of this lane's two elements of each matrix
  for (int i = 0; i < 4; ++i)
    for (int e = 0; e < 2; ++e)
      std::memcpy(&rows[i][e], all + 8 * i + (transposed ? l % 4 * 2 + e : l / 4), sizeof row);
  for (int i = 0; i < 4; ++i) {
    const int column = transposed ? l / 4 : l % 4 * 2;
    const bf16 low = rows[i][0][column], high = rows[i][1][column + !transposed];
    out[i] = low.bits | uint32_t{high.bits} << 16;
  }
}

}  // namespace emulated

inline void ldmatrix_x4(uint32_t (&out)[4], const bf16* row,
                        std::source_location at = std::source_location::current()) {
  emulated::load_matrices(out, row, false, at);
}
inline void ldmatrix_x4_trans(uint32_t (&out)[4], const bf16* row,
                              std::source_location at = std::source_location::current()) {
  emulated::load_matrices(out, row, true, at);
}

inline void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                         std::source_location at = std::source_location::current()) {
  emulated::multiply(emulated::Mma::kBf16, a, b0, b1, c, at);
}

// Products are exact in float; sums are rounded to float.
inline void mma_m16n8k32_e4m3(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                              std::source_location at = std::source_location::current()) {
  emulated::multiply(emulated::Mma::kE4m3, a, b0, b1, c, at);
}

inline uint32_t load_acquire(const uint32_t* p) {
  emulated::yield();
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
inline void store_release(uint32_t* p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
inline uint32_t add_acq_rel(uint32_t* p, uint32_t v) {
  return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL);
}

}  // namespace tandem::gpu
