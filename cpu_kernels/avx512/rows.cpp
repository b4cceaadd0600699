// Rows that travel between ranks as FP8 (kernels.h, EncodeFp8Args), with AVX-512. Rows are added by
// the kernel for AVX2, which is as fast as memory.
#include <immintrin.h>

#include "cpu_kernels/fp8_rows.h"

namespace tandem::cpu {
namespace {

constexpr int kLanes = 16;

__m512i size_of(__m512i bits) { return _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)); }

// The E4M3 codes of sixteen numbers (fp8_rows.h).
__m128i codes_of(__m512i x) {
  const __m512i size = _mm512_min_epi32(size_of(x), _mm512_set1_epi32(bits_of(448)));
  const __m512i power =
      _mm512_max_epi32(_mm512_and_si512(size, _mm512_set1_epi32(bits_of(__builtin_inff()))),
                       _mm512_set1_epi32(bits_of(0x1p-6f)));
  const __m512i rounded = _mm512_castps_si512(_mm512_fmadd_ps(
      _mm512_castsi512_ps(power), _mm512_set1_ps(0x1p20f), _mm512_castsi512_ps(size)));
  const __m512i code =
      _mm512_sub_epi32(_mm512_add_epi32(_mm512_and_si512(rounded, _mm512_set1_epi32(31)),
                                        _mm512_srli_epi32(rounded, 20)),
                       _mm512_set1_epi32(kCodeOffset));
  const __m512i sign = _mm512_and_si512(_mm512_srli_epi32(x, 24), _mm512_set1_epi32(0x80));
  return _mm512_cvtepi32_epi8(_mm512_or_si512(code, sign));
}

float largest_of(const float* from) {
  __m512i sizes = _mm512_setzero_si512();
  for (int c = 0; c < kScaledColumns; c += kLanes)
    sizes = _mm512_max_epi32(sizes, size_of(_mm512_castps_si512(_mm512_loadu_ps(from + c))));
  return __builtin_bit_cast(float, _mm512_reduce_max_epi32(sizes));
}

void encode_block(const float* from, float inverse, uint8_t* codes) {
  for (int c = 0; c < kScaledColumns; c += kLanes) {
    const __m512 x = _mm512_mul_ps(_mm512_loadu_ps(from + c), _mm512_set1_ps(inverse));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + c), codes_of(_mm512_castps_si512(x)));
  }
}

// 32 codes. Their bits, moved to those of half precision, read as 2^-8 times the value; `unit` is
// 2^8 times the scale, so that each number is rounded once.
void decode(const uint8_t* codes, __m512 unit, float* to) {
  const __m512i wide =
      _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
  const __m512i size = _mm512_slli_epi16(_mm512_and_si512(wide, _mm512_set1_epi16(0x7f)), 7);
  const __m512i sign = _mm512_and_si512(wide, _mm512_set1_epi16(static_cast<short>(0x8000)));
  const __m512i halves = _mm512_or_si512(size, sign);
  const __m512 low = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
  const __m512 high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
  _mm512_storeu_ps(to, _mm512_mul_ps(low, unit));
  _mm512_storeu_ps(to + kLanes, _mm512_mul_ps(high, unit));
}

void decode_block(const uint8_t* codes, float scale, float* to) {
  const __m512 unit = _mm512_set1_ps(256 * scale);
  for (int c = 0; c < kScaledColumns; c += 2 * kLanes) decode(codes + c, unit, to + c);
}

}  // namespace

void install_avx512_rows(KernelTable& t) {
  t.encode_fp8 = encode_blocks<largest_of, encode_block>;
  t.decode_fp8 = decode_blocks<decode_block>;
}

}  // namespace tandem::cpu
