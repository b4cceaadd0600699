// Emulation of cuda/packed.h for g++.
#pragma once
#include <cmath>

#include "device.h"

namespace tandem::gpu {

inline float bf16_low(uint32_t pair) { return std::bit_cast<float>(pair << 16); }
inline float bf16_high(uint32_t pair) { return std::bit_cast<float>(pair & 0xffff0000u); }

inline uint32_t pack_bf16(float low, float high) {
  return narrow(low).bits | uint32_t{narrow(high).bits} << 16;
}

inline uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  return pack_bf16(std::fma(bf16_low(a), bf16_low(b), bf16_low(c)),
                   std::fma(bf16_high(a), bf16_high(b), bf16_high(c)));
}

inline uint32_t select_bytes(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t bytes = uint64_t{high} << 32 | low;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i)
    out |= static_cast<uint32_t>(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return out;
}

inline uint4 load_once_16(const void* p, emulated::Where at = emulated::Where::current()) {
  if (reinterpret_cast<uintptr_t>(p) % 16) emulated::fault("global address misaligned", at);
  return *static_cast<const uint4*>(p);
}

template <class T>
const T* kept(const T* p) {
  return p;
}

inline float exp2_approx(float x) { return std::exp2(x); }

inline uint32_t arrive(uint32_t* count) { return add_acq_rel(count, 1); }

}  // namespace tandem::gpu
