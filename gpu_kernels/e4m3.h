// Exact widening of FP8 weights to BF16 in registers, and rounding of floats to FP8.
#pragma once
#include "packed.h"

namespace tandem::gpu {

// Widens codes 0 and 1 of a word to `low`, codes 2 and 3 to `high`. A code's sign and magnitude
// bits, moved to their BF16 positions, read as 2^-120 times its value, subnormals included; the
// multiplication is exact. The two NaN codes read as 480 and -480: weights contain none.
//
// 16 times a code has its magnitude in place and its sign in bit 11; 15 times that bit carries it
// to bit 15. GPUs multiply integers beside the pipe for logic and shifts, which otherwise is the
// busiest one.
__device__ inline void widen_e4m3(uint32_t codes, uint32_t& low, uint32_t& high) {
  constexpr uint32_t kSigns = 0x00800080, kTwoTo120 = 0x7b807b80, kMinusZero = 0x80008000;
  const uint32_t first = select_bytes(codes, 0, 0x4140);  // code 0 in byte 0, code 1 in byte 2
  const uint32_t second = select_bytes(codes, 0, 0x4342);
  low = fma_bf16x2(16 * first + 15 * 16 * (first & kSigns), kTwoTo120, kMinusZero);
  high = fma_bf16x2(16 * second + 15 * 16 * (second & kSigns), kTwoTo120, kMinusZero);
}

// The nearest code, ties to even, saturating at 448. v must not be NaN.
__device__ inline uint32_t to_e4m3(float v) {
  const uint32_t u = __float_as_uint(v), sign = u >> 24 & 0x80;
  const float magnitude = fabsf(v);
  if (magnitude < 0x1p-6f) return sign | static_cast<uint32_t>(rintf(magnitude * 0x1p9f));
  const uint32_t rounded = __float_as_uint(magnitude) + 0x7ffff + (u >> 20 & 1);
  return sign | min((rounded >> 20) - (120 << 3), 0x7eu);
}

// The scale of a block follows from its largest magnitude. Numbers that are not finite count as
// infinite and make the whole block NaN. A block of zeros has scale 1.
__device__ inline float e4m3_magnitude(float v) {
  return fabsf(v) < INFINITY ? fabsf(v) : INFINITY;
}
__device__ inline float e4m3_scale(float largest) { return largest > 0 ? largest / 448 : 1; }
__device__ inline uint32_t to_e4m3(float v, float scale) {
  return scale < INFINITY ? to_e4m3(v / scale) : 0;
}

}  // namespace tandem::gpu
