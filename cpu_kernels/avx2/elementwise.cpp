// Norms, element-wise kernels and conversions with AVX2, FMA and F16C.
#include "cpu_kernels/avx2/lanes.h"
#include "cpu_kernels/kernels.h"

namespace tandem::cpu {
namespace {

// Widens eight E4M3 codes. (magnitude << 7 | sign << 8) is the half-precision number 2^-8 times the
// value, subnormals included; vcvtph2ps converts it exactly. The loader rejects the NaN code.
__m256 widen_e4m3(__m128i codes) {
  const __m128i wide = _mm_cvtepu8_epi16(codes);
  const __m128i magnitude = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(0x3f80));
  const __m128i sign =
      _mm_and_si128(_mm_slli_epi16(wide, 8), _mm_set1_epi16(static_cast<short>(0x8000)));
  return _mm256_mul_ps(_mm256_cvtph_ps(_mm_or_si128(magnitude, sign)), _mm256_set1_ps(256));
}

struct LoadF16 {
  static constexpr int kBytes = 2;
  static __m256 load(const void* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  }
};
struct LoadE4m3 {
  static constexpr int kBytes = 1;
  static __m256 load(const void* p) {
    return widen_e4m3(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
  }
};

template <class Load>
void widen(const void* from, int64_t n, float* to) {
  const char* p = static_cast<const char*>(from);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) _mm256_storeu_ps(to + i, Load::load(p + i * Load::kBytes));
  if (i == n) return;
  alignas(32) char tail[32] = {};
  __builtin_memcpy(tail, p + i * Load::kBytes, (n - i) * Load::kBytes);
  store_floats(to + i, n - i, Load::load(tail));
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

// Sums over the lanes of four vectors; the order of each sum does not depend on the other vectors.
__m128 sum_lanes(__m256 a, __m256 b, __m256 c, __m256 d) {
  const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  return _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1));
}

float sum_lanes(__m256 a) { return _mm_cvtss_f32(sum_lanes(a, a, a, a)); }

void rms_norm(const RmsNormArgs& a) {
  __m256 acc[1][1] = {};
  accumulate<1, 1>(&a.x, a.x, 0, a.n, acc);
  const float scale = 1 / __builtin_sqrtf(sum_lanes(acc[0][0]) / static_cast<float>(a.n) + a.eps);
  const __m256 s = _mm256_set1_ps(scale);
  for (int i = 0; i < a.n; i += kLanes) {
    const __m256 x = load_floats(a.x + i, a.n - i), gain = load_floats(a.gain + i, a.n - i);
    store_floats(a.out + i, a.n - i, _mm256_mul_ps(_mm256_mul_ps(x, s), gain));
  }
}

void silu_mul(const SiluMulArgs& a) {
  for (int64_t i = 0; i < a.n; i += kLanes) {
    const __m256 gate = load_floats(a.gate + i, a.n - i), up = load_floats(a.up + i, a.n - i);
    const __m256 below =
        _mm256_add_ps(_mm256_set1_ps(1), exp(_mm256_sub_ps(_mm256_setzero_ps(), gate)));
    store_floats(a.out + i, a.n - i, _mm256_mul_ps(_mm256_div_ps(gate, below), up));
  }
}

void decode(const DecodeArgs& a) {
  switch (a.type) {
    case WeightType::kF32:
      return widen<LoadF32>(a.from, a.n, a.to);
    case WeightType::kF16:
      return widen<LoadF16>(a.from, a.n, a.to);
    case WeightType::kBF16:
      return widen<LoadBf16>(a.from, a.n, a.to);
    case WeightType::kF8E4M3:
      return widen<LoadE4m3>(a.from, a.n, a.to);
    case WeightType::kI8:
    case WeightType::kI4:
    case WeightType::kI4TwoLevel:
      break;  // only exist packed
  }
}

// The upper halves of eight numbers after rounding, [8 of 32 bits].
__m256i rounded(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd),
                           16);
}

// The same with NaN, of which rounding could make infinity.
__m256i rounded_or_nan(__m256 x) {
  const __m256i quiet =
      _mm256_or_si256(_mm256_srli_epi32(_mm256_castps_si256(x), 16), _mm256_set1_epi32(0x40));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded(x), quiet, nan);
}

void encode_bf16(const EncodeBf16Args& a) {
  int64_t i = 0;
  for (; i + 2 * kLanes <= a.n; i += 2 * kLanes) {
    const __m256 low = _mm256_loadu_ps(a.from + i), high = _mm256_loadu_ps(a.from + i + kLanes);
    const bool has_nan = _mm256_movemask_ps(_mm256_cmp_ps(low, high, _CMP_UNORD_Q));
    const __m256i packed = has_nan ? _mm256_packus_epi32(rounded_or_nan(low), rounded_or_nan(high))
                                   : _mm256_packus_epi32(rounded(low), rounded(high));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(a.to + i),
                        _mm256_permute4x64_epi64(packed, 0xd8));
  }
  if (i == a.n) return;
  float tail[2 * kLanes] = {};
  bf16 encoded[2 * kLanes];
  __builtin_memcpy(tail, a.from + i, (a.n - i) * sizeof(float));
  encode_bf16({tail, encoded, 2 * kLanes});
  __builtin_memcpy(a.to + i, encoded, (a.n - i) * sizeof(bf16));
}

}  // namespace

void install_avx2_elementwise(KernelTable& t) {
  t.rms_norm = rms_norm;
  t.silu_mul = silu_mul;
  t.decode = decode;
  t.encode_bf16 = encode_bf16;
}

}  // namespace tandem::cpu
