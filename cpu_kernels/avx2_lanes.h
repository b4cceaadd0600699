// What the AVX2 kernel files share: eight lanes of float, widening of stored numbers, dot products.
#pragma once
#include <immintrin.h>

#include "cpu_kernels/kernels.h"

namespace tandem::cpu {
namespace {

constexpr int kLanes = 8;

int min(int a, int b) { return a < b ? a : b; }

// The first n of 8 lanes.
__m256i lane_mask(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

// ------------------------------------------------------------------------------------------------------

// Eight E4M3 codes. Magnitude << 7 and sign << 8 is the half-precision number 2^-8 times the value,
// subnormals included; vcvtph2ps converts it exactly. The code of NaN is refused by the loader.
__m256 widen_e4m3(__m128i codes) {
  const __m128i wide = _mm_cvtepu8_epi16(codes);
  const __m128i magnitude = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(0x3f80));
  const __m128i sign =
      _mm_and_si128(_mm_slli_epi16(wide, 8), _mm_set1_epi16(static_cast<short>(0x8000)));
  return _mm256_mul_ps(_mm256_cvtph_ps(_mm_or_si128(magnitude, sign)), _mm256_set1_ps(256));
}

struct LoadF32 {
  static constexpr int kBytes = 4;
  static __m256 load(const void* p) { return _mm256_loadu_ps(static_cast<const float*>(p)); }
};
struct LoadF16 {
  static constexpr int kBytes = 2;
  static __m256 load(const void* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  }
};
struct LoadBf16 {
  static constexpr int kBytes = 2;
  static __m256 load(const void* p) {
    const __m128i bits = _mm_loadu_si128(static_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
};
struct LoadE4m3 {
  static constexpr int kBytes = 1;
  static __m256 load(const void* p) {
    return widen_e4m3(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
  }
};

template <class Load>
void widen(const void* from, int64_t first, int64_t n, float scale, float* to) {
  const char* p = static_cast<const char*>(from) + first * Load::kBytes;
  const __m256 s = _mm256_set1_ps(scale);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    _mm256_storeu_ps(to + i, _mm256_mul_ps(Load::load(p + i * Load::kBytes), s));
  if (i == n) return;
  alignas(32) char tail[32] = {};
  __builtin_memcpy(tail, p + i * Load::kBytes, (n - i) * Load::kBytes);
  _mm256_maskstore_ps(to + i, lane_mask(static_cast<int>(n - i)),
                      _mm256_mul_ps(Load::load(tail), s));
}

void widen(const void* from, WeightType type, int64_t first, int64_t n, float scale, float* to) {
  switch (type) {
    case WeightType::kF32:
      return widen<LoadF32>(from, first, n, scale, to);
    case WeightType::kF16:
      return widen<LoadF16>(from, first, n, scale, to);
    case WeightType::kBF16:
      return widen<LoadBf16>(from, first, n, scale, to);
    case WeightType::kF8E4M3:
      return widen<LoadE4m3>(from, first, n, scale, to);
    case WeightType::kI8:
    case WeightType::kI4:
      break;
  }
}

// acc[i][j] += x[i] . w[j] over n columns, lane by lane.
template <int M, int N>
void accumulate(const float* const* x, const float* w, int64_t w_stride, int n,
                __m256 (&acc)[M][N]) {
  int c = 0;
  for (; c + kLanes <= n; c += kLanes) {
    __m256 xs[M];
    for (int i = 0; i < M; ++i) xs[i] = _mm256_loadu_ps(x[i] + c);
    for (int j = 0; j < N; ++j) {
      const __m256 ws = _mm256_loadu_ps(w + j * w_stride + c);
      for (int i = 0; i < M; ++i) acc[i][j] = _mm256_fmadd_ps(xs[i], ws, acc[i][j]);
    }
  }
  if (c == n) return;
  const __m256i mask = lane_mask(n - c);
  for (int j = 0; j < N; ++j) {
    const __m256 ws = _mm256_maskload_ps(w + j * w_stride + c, mask);
    for (int i = 0; i < M; ++i)
      acc[i][j] = _mm256_fmadd_ps(_mm256_maskload_ps(x[i] + c, mask), ws, acc[i][j]);
  }
}

// The sums over the lanes of four vectors; each is formed in the same order whatever stands beside
// it.
__m128 sum_lanes(__m256 a, __m256 b, __m256 c, __m256 d) {
  const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  return _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1));
}

float sum_lanes(__m256 a) { return _mm_cvtss_f32(sum_lanes(a, a, a, a)); }

}  // namespace
}  // namespace tandem::cpu
