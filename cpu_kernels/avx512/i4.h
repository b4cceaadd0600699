// Widening of INT4 to INT8.
#pragma once
#include <immintrin.h>

namespace tandem::cpu {
namespace {

// The two INT8 steps of an INT4 step, of 16 times the codes.
__m512i second_of_i4(__m512i step) {
  return _mm512_and_si512(step, _mm512_set1_epi8(static_cast<char>(0xf0)));
}
__m512i first_of_i4(__m512i step) { return second_of_i4(_mm512_slli_epi16(step, 4)); }

[[maybe_unused]] void widen_i4(__m512i step, __m512i* first, __m512i* second) {
  *first = first_of_i4(step);
  *second = second_of_i4(step);
}

// Constants that turn codes into INT8 where every row has a multiplier m: (code + 8) * m - 8 * m,
// and for negative m (7 - code) * -m + 7 * m. Both first factors are below 16, so the products of
// two neighbouring bytes fit one word multiplication.
struct Multipliers {
  __m512i flip, times, less;
};

Multipliers multipliers_of(const int8_t* of_rows) {
  const __m512i m = _mm512_cvtepi8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(of_rows)));
  const __mmask16 negative = _mm512_movepi32_mask(m);
  const __m512i magnitude = _mm512_abs_epi32(m);
  const __m512i words = _mm512_or_si512(magnitude, _mm512_slli_epi32(magnitude, 16));
  const __m512i bytes = _mm512_or_si512(words, _mm512_slli_epi32(words, 8));
  const __m512i eight = _mm512_slli_epi16(bytes, 3);
  return {_mm512_mask_mov_epi32(_mm512_set1_epi8(static_cast<char>(0x88)), negative,
                                _mm512_set1_epi8(0x77)),
          words, _mm512_mask_sub_epi32(eight, negative, eight, bytes)};
}

// Widens an INT4 step to two INT8 steps of codes times multipliers.
void widen_i4(__m512i step, const Multipliers& m, __m512i* first, __m512i* second) {
  const __m512i low = _mm512_set1_epi8(0x0f);
  constexpr int kFlipThenAnd = 0x28;  // (a ^ b) & c
  const __m512i a = _mm512_ternarylogic_epi32(step, m.flip, low, kFlipThenAnd);
  const __m512i b =
      _mm512_ternarylogic_epi32(_mm512_srli_epi16(step, 4), m.flip, low, kFlipThenAnd);
  *first = _mm512_sub_epi8(_mm512_mullo_epi16(a, m.times), m.less);
  *second = _mm512_sub_epi8(_mm512_mullo_epi16(b, m.times), m.less);
}

}  // namespace
}  // namespace tandem::cpu
