// Storage types of the low-precision formats and their host conversions. Needs no CUDA header, so
// CPU-only machines compile every kernel; device code converts with to_float() and to_bf16() of
// device.h.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>

namespace tandem {

struct bf16 {
  uint16_t bits;
};
struct fp8_e4m3 {
  uint8_t bits;
};

constexpr float widen(bf16 v) { return std::bit_cast<float>(uint32_t{v.bits} << 16); }

// Round to nearest even; every NaN becomes 0x7fff, as the GPU's cvt.rn.bf16.f32 does.
constexpr bf16 narrow(float v) {
  const uint32_t u = std::bit_cast<uint32_t>(v);
  if (v != v) return {0x7fff};
  return {static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16)};
}

// OCP e4m3: bias 7, no infinities, 0x7f and 0xff are NaN.
inline float widen(fp8_e4m3 v) {
  const int exponent = v.bits >> 3 & 15, mantissa = v.bits & 7;
  const float sign = v.bits & 0x80 ? -1.0f : 1.0f;
  if (exponent == 15 && mantissa == 7) return NAN;
  return sign *
         (exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp(1.0f * mantissa, -9));
}

// Element types of matrices on the GPU.
enum class Number : uint8_t { kF32, kBF16, kF8E4M3 };

constexpr int64_t bytes_of(Number n) { return n == Number::kF32 ? 4 : n == Number::kBF16 ? 2 : 1; }

}  // namespace tandem
