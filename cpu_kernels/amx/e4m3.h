// Conversion of E4M3 to BF16 by affine functions of bits, for AMX's product files.
#pragma once
#include "cpu_kernels/avx512/e4m3.h"

namespace tandem::cpu {
namespace {

// Widens one FP8 step to two BF16 steps. The bytes of a BF16 number are affine functions of the
// bits of an E4M3 code whose exponent is not 0: with exponent bits e3 e2 e1 e0, to which 120 is
// added, the high byte is sign, e3, not e3 four times, e2 e1, and the low byte e0, the mantissa and
// zeros. A step with any other code is looked up; weights have few such steps.
[[gnu::always_inline]] inline void widen_e4m3_step(const E4m3Table& table, __m512i codes,
                                                   __m512i* first, __m512i* second) {
  const __m512i exponent = _mm512_set1_epi8(0x78);
  if (__builtin_expect(_mm512_testn_epi8_mask(codes, exponent) != 0, 0))
    return widen_e4m3(table, codes, first, second);
  const __m512i low_bits = _mm512_set1_epi64(0x0000000001020408);
  const __m512i high_bits = _mm512_set1_epi64(0x1020404040404080);
  const __m512i low = _mm512_gf2p8affine_epi64_epi8(codes, low_bits, 0);
  const __m512i high = _mm512_gf2p8affine_epi64_epi8(codes, high_bits, 0x3c);
  *first = _mm512_unpacklo_epi8(low, high);
  *second = _mm512_unpackhi_epi8(low, high);
}

}  // namespace
}  // namespace tandem::cpu
