// Eight lanes of float, for the AVX2 kernel files.
#pragma once
#include <immintrin.h>

namespace tandem::cpu {
namespace {

constexpr int kLanes = 8;

// Mask of the first n of 8 lanes.
inline __m256i lane_mask(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

// The first n of 8 floats; the other lanes are 0.
inline __m256 load_floats(const float* from, int64_t n) {
  return n >= kLanes ? _mm256_loadu_ps(from)
                     : _mm256_maskload_ps(from, lane_mask(static_cast<int>(n)));
}

// Stores the first n of 8 floats. AMD's cores take 12 to 20 cycles for a masked store.
inline void store_floats(float* to, int64_t n, __m256 v) {
  if (n >= kLanes) return _mm256_storeu_ps(to, v);
  _mm256_maskstore_ps(to, lane_mask(static_cast<int>(n)), v);
}

inline __m256i load(const char* from) {
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(from));
}

inline float max_lane(__m256 v) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps(m, m, 1)));
}

// Loads of eight numbers as float.
struct LoadF32 {
  static constexpr int kBytes = 4;
  static __m256 load(const void* p) { return _mm256_loadu_ps(static_cast<const float*>(p)); }
};
struct LoadBf16 {
  static constexpr int kBytes = 2;
  static __m256 load(const void* p) {
    const __m128i bits = _mm_loadu_si128(static_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
};
// Transposes 8 x 8 numbers of 32 bits.
inline void transpose(__m256i (&r)[8]) {
  __m256i t[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x20);
    t[i + 4] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x31);
  }
  for (int i = 0; i < 8; ++i) r[i] = t[i];
}

// e^x within 2 ulp for -87 <= x <= 88, clamped outside. Range reduction by ln 2 in two parts and
// the polynomial of Cephes' expf.
inline __m256 exp(__m256 x) {
  x = _mm256_min_ps(_mm256_max_ps(x, _mm256_set1_ps(-87.f)), _mm256_set1_ps(88.f));
  const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504088896341f)),
                                   _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
  __m256 p = _mm256_set1_ps(1.9875691500e-4f);
  constexpr float kTerms[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f,
                              1.6666665459e-1f, 5.0000001201e-1f};
  for (const float c : kTerms) p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(c));
  p = _mm256_add_ps(_mm256_fmadd_ps(p, _mm256_mul_ps(r, r), r), _mm256_set1_ps(1));
  const __m256i power =
      _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(p, _mm256_castsi256_ps(power));
}

}  // namespace
}  // namespace tandem::cpu
