// Eight lanes of float, for the AVX2 kernel files.
#pragma once
#include <immintrin.h>

namespace tandem::cpu {
namespace {

constexpr int kLanes = 8;

// Mask of the first n of 8 lanes.
__m256i lane_mask(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

inline float max_lane(__m256 v) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps(m, m, 1)));
}

}  // namespace
}  // namespace tandem::cpu
