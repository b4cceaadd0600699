// Exact conversion of E4M3 to BF16 by table, for the AVX-512 product files.
#pragma once
#include <immintrin.h>

#include "cpu_kernels/kernels.h"

namespace tandem::cpu {
namespace {

// The magnitude bits of an E4M3 code index the two bytes of its value in BF16, which represents
// every E4M3 value exactly.
struct E4m3Bytes {
  uint8_t low[128], high[128];
};

constexpr E4m3Bytes e4m3_bytes() {
  E4m3Bytes t{};
  for (int code = 0; code < 128; ++code) {
    int exponent = code >> 3, mantissa = code & 7;
    int bits = 0;
    if (exponent > 0) {
      bits = (exponent + 120) << 7 | mantissa << 4;
    } else if (mantissa > 0) {  // mantissa * 2^-9
      int shift = 0;
      while ((mantissa << shift & 8) == 0) ++shift;
      bits = (121 - shift) << 7 | (mantissa << shift & 7) << 4;
    }
    t.low[code] = static_cast<uint8_t>(bits & 0xff);
    t.high[code] = static_cast<uint8_t>(bits >> 8);
  }
  return t;
}

alignas(64) constexpr E4m3Bytes kE4m3Bytes = e4m3_bytes();

struct E4m3Table {
  __m512i low0 = _mm512_load_si512(kE4m3Bytes.low), low1 = _mm512_load_si512(kE4m3Bytes.low + 64);
  __m512i high0 = _mm512_load_si512(kE4m3Bytes.high),
          high1 = _mm512_load_si512(kE4m3Bytes.high + 64);
  __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
};

// Widens one FP8 step to two BF16 steps.
void widen_e4m3(const E4m3Table& t, __m512i codes, __m512i* first, __m512i* second) {
  const __m512i low = _mm512_permutex2var_epi8(t.low0, codes, t.low1);
  const __m512i magnitude = _mm512_permutex2var_epi8(t.high0, codes, t.high1);
  const __m512i high = _mm512_ternarylogic_epi32(magnitude, codes, t.sign, 0xf8);  // a | (b & c)
  *first = _mm512_unpacklo_epi8(low, high);
  *second = _mm512_unpackhi_epi8(low, high);
}

}  // namespace
}  // namespace tandem::cpu
