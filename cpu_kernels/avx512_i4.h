// INT4 as INT8.
#pragma once
#include <immintrin.h>

namespace tandem::cpu {
namespace {

// Sixteen times the codes of an INT4 step, to two INT8 steps.
void widen_i4(__m512i step, __m512i* first, __m512i* second) {
  const __m512i high = _mm512_set1_epi8(static_cast<char>(0xf0));
  *first = _mm512_and_si512(_mm512_slli_epi16(step, 4), high);
  *second = _mm512_and_si512(step, high);
}

}  // namespace
}  // namespace tandem::cpu
