// Words of packed small numbers, and streaming loads of weights, for the matrix kernels.
// emulated/packed.h has the same names.
#pragma once
#include "device.h"

namespace tandem::gpu {

__device__ inline float bf16_low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ inline float bf16_high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// Rounds both to nearest even.
__device__ inline uint32_t pack_bf16(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// a * b + c of both halves; exact for subnormal a, unlike BF16 multiplication before sm_90.
__device__ inline uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t out;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  return out;
}

// Nibble i of `selector` chooses byte i of the result from the eight bytes of high:low.
__device__ inline uint32_t select_bytes(uint32_t low, uint32_t high, uint32_t selector) {
  return __byte_perm(low, high, selector);
}

// Loads 16 bytes that are read once, without allocating a level-1 cache line.
__device__ inline uint4 load_once_16(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// Keeps the pointer in registers; otherwise loops recompute addresses.
template <class T>
__device__ inline const T* kept(const T* p) {
  asm volatile("" : "+l"(p));
  return p;
}

// 2^x to about 2 units in the last place; 0 for -inf.
__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Adds 1 and returns the old value, ordering memory between the blocks of one GPU.
__device__ inline uint32_t arrive(uint32_t* count) {
  uint32_t old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(old) : "l"(count) : "memory");
  return old;
}

}  // namespace tandem::gpu
