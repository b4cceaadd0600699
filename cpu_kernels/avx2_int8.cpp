// Bytes without VNNI: the saturating VPMADDUBSW is of no use for 8-bit weights, so even and odd
// bytes are widened and multiplied as words.
#include "cpu_kernels/avx2_int8.h"

#include "cpu_kernels/avx2_lanes.h"

namespace tandem::cpu {

void avx2_gemm(const GemmArgs&);

namespace {

struct WordDot {
  static Integers add(Integers sum, __m256i x, __m256i w) {
    const __m256i even_x = _mm256_and_si256(x, _mm256_set1_epi16(255));
    const __m256i odd_x = _mm256_srli_epi16(x, 8);
    const __m256i even_w = _mm256_srai_epi16(_mm256_slli_epi16(w, 8), 8);
    const __m256i odd_w = _mm256_srai_epi16(w, 8);
    const __m256i even = _mm256_madd_epi16(even_x, even_w), odd = _mm256_madd_epi16(odd_x, odd_w);
    return (Integers)_mm256_add_epi32((__m256i)sum, _mm256_add_epi32(even, odd));
  }
};

void gemm(const GemmArgs& a) {
  a.x.type == ActivationType::kU8 ? gemm_int8<WordDot>(a) : avx2_gemm(a);
}

// The first n of 8 floats, zeros after them.
__m256 load_floats(const float* from, int n) { return _mm256_maskload_ps(from, lane_mask(n)); }

void encode(const EncodeArgs& a) {
  __m256 max = _mm256_setzero_ps();
  const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  for (int c = 0; c < a.k; c += 8)
    max = _mm256_max_ps(max, _mm256_and_ps(magnitude, load_floats(a.from + c, a.k - c)));
  *a.scale = max_lane(max) / 127;
  const __m256 inverse = _mm256_set1_ps(*a.scale > 0 ? 1 / *a.scale : 0);
  char* to = static_cast<char*>(a.to);
  for (int c = 0; c < encoded_columns(a.k); c += 8) {
    const __m256 x = _mm256_mul_ps(load_floats(a.from + c, a.k - c), inverse);
    const __m256i code = _mm256_add_epi32(_mm256_cvtps_epi32(x), _mm256_set1_epi32(128));
    const __m128i words =
        _mm_packs_epi32(_mm256_castsi256_si128(code), _mm256_extracti128_si256(code, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to + c), _mm_packus_epi16(words, words));
  }
}

}  // namespace

void install_avx2_int8(KernelTable& t) {
  t.activation[static_cast<int>(WeightType::kI8)] = ActivationType::kU8;
  t.activation[static_cast<int>(WeightType::kI4)] = ActivationType::kU8;
  t.encode = encode;
  t.gemm = gemm;
}

}  // namespace tandem::cpu
