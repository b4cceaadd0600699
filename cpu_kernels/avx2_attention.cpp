// Attention, norms and element-wise kernels with AVX2, FMA and F16C.
#include "cpu_kernels/avx2_lanes.h"
#include "cpu_kernels/kernels.h"

namespace tandem::cpu {
namespace {

int min(int a, int b) { return a < b ? a : b; }

// Widens eight E4M3 codes. (magnitude << 7 | sign << 8) is the half-precision number 2^-8 times the
// value, subnormals included; vcvtph2ps converts it exactly. The loader rejects the NaN code.
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
void widen(const void* from, int64_t n, float* to) {
  const char* p = static_cast<const char*>(from);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) _mm256_storeu_ps(to + i, Load::load(p + i * Load::kBytes));
  if (i == n) return;
  alignas(32) char tail[32] = {};
  __builtin_memcpy(tail, p + i * Load::kBytes, (n - i) * Load::kBytes);
  _mm256_maskstore_ps(to + i, lane_mask(static_cast<int>(n - i)), Load::load(tail));
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

// e^x within 2 ulp for -87 <= x <= 88, clamped outside. Range reduction by ln 2 in two parts and
// the polynomial of Cephes' expf.
__m256 exp(__m256 x) {
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

// A block of keys and values as float.
struct Keys {
  const float *k, *k_rope, *v;
  int64_t k_stride, k_rope_stride, v_stride;
  int n_keys, visible;
};

// score[i][j] = q[i] . k[j] + q_rope[i] . k_rope[j] for M queries and n_keys keys.
template <int M>
void scores(const AttendArgs& a, const Keys& b, int query, int n_keys, float (*score)[kMaxKeys]) {
  const float *q[M], *q_rope[M];
  for (int i = 0; i < M; ++i) {
    q[i] = a.q + (query + i) * a.q_stride;
    q_rope[i] = a.q_rope + (query + i) * a.q_rope_stride;
  }
  int j = 0;
  for (; j + 4 <= n_keys; j += 4) {
    __m256 acc[M][4] = {};
    accumulate<M, 4>(q, b.k + j * b.k_stride, b.k_stride, a.dim, acc);
    accumulate<M, 4>(q_rope, b.k_rope + j * b.k_rope_stride, b.k_rope_stride, a.rope_dim, acc);
    for (int i = 0; i < M; ++i)
      _mm_storeu_ps(score[i] + j, sum_lanes(acc[i][0], acc[i][1], acc[i][2], acc[i][3]));
  }
  for (; j < n_keys; ++j) {
    __m256 acc[M][1] = {};
    accumulate<M, 1>(q, b.k + j * b.k_stride, b.k_stride, a.dim, acc);
    accumulate<M, 1>(q_rope, b.k_rope + j * b.k_rope_stride, b.k_rope_stride, a.rope_dim, acc);
    for (int i = 0; i < M; ++i) score[i][j] = sum_lanes(acc[i][0]);
  }
}

// Replaces one query's scores by exp(score - max), and by 0 for keys that it does not see. Returns
// the factor that rescales its previous sums.
float apply_softmax(float* score, int visible, float scale, float* max, float* sum) {
  const __m256 none = _mm256_set1_ps(-__builtin_inff());
  __m256 top = _mm256_set1_ps(*max);
  for (int j = 0; j < kMaxKeys; j += kLanes) {
    const __m256 seen = _mm256_castsi256_ps(lane_mask(visible - j));
    const __m256 s = _mm256_blendv_ps(
        none, _mm256_mul_ps(_mm256_load_ps(score + j), _mm256_set1_ps(scale)), seen);
    _mm256_store_ps(score + j, s);
    top = _mm256_max_ps(top, s);
  }
  const float new_max = max_lane(top);
  __m256 total = _mm256_setzero_ps();
  for (int j = 0; j < kMaxKeys; j += kLanes) {
    const __m256 seen = _mm256_castsi256_ps(lane_mask(visible - j));
    const __m256 p =
        _mm256_and_ps(exp(_mm256_sub_ps(_mm256_load_ps(score + j), _mm256_set1_ps(new_max))), seen);
    _mm256_store_ps(score + j, p);
    total = _mm256_add_ps(total, p);
  }
  const float shrink = _mm256_cvtss_f32(exp(_mm256_set1_ps(*max - new_max)));
  *sum = *sum * shrink + sum_lanes(total);
  *max = new_max;
  return shrink;
}

// out[i] = out[i] * shrink[i] + p[i] . v for M queries.
template <int M>
void blend_values(const AttendArgs& a, const Keys& b, int query, int n_keys,
                  const float (*p)[kMaxKeys], const float* shrink) {
  for (int c = 0; c < a.v_dim; c += kLanes) {
    const __m256i mask = lane_mask(a.v_dim - c);
    __m256 sum[M];
    for (int i = 0; i < M; ++i) {
      const __m256 before = _mm256_maskload_ps(a.out + (query + i) * a.out_stride + c, mask);
      sum[i] = _mm256_mul_ps(before, _mm256_set1_ps(shrink[i]));
    }
    for (int j = 0; j < n_keys; ++j) {
      const __m256 v = _mm256_maskload_ps(b.v + j * b.v_stride + c, mask);
      for (int i = 0; i < M; ++i)
        sum[i] = _mm256_fmadd_ps(_mm256_broadcast_ss(p[i] + j), v, sum[i]);
    }
    for (int i = 0; i < M; ++i)
      _mm256_maskstore_ps(a.out + (query + i) * a.out_stride + c, mask, sum[i]);
  }
}

template <int M>
void attend_queries(const AttendArgs& a, const Keys& b, int query) {
  alignas(32) float p[M][kMaxKeys] = {};
  int visible[M];
  int n_keys = 0;
  for (int i = 0; i < M; ++i) {
    visible[i] = min(b.n_keys, b.visible + (a.first_query + query + i) / a.queries_per_token);
    if (visible[i] > n_keys) n_keys = visible[i];
  }
  if (n_keys <= 0) return;
  scores<M>(a, b, query, n_keys, p);
  float shrink[M];
  for (int i = 0; i < M; ++i) {
    const bool sees = visible[i] > 0;
    shrink[i] =
        sees ? apply_softmax(p[i], visible[i], a.scale, a.max + query + i, a.sum + query + i) : 1;
    if (!sees) __builtin_memset(p[i], 0, sizeof(p[i]));
  }
  blend_values<M>(a, b, query, n_keys, p, shrink);
}

// Widens rows of BF16 to dense rows of float.
void widen_rows(const void* rows, int64_t stride, int n_rows, int n, float* to) {
  for (int j = 0; j < n_rows; ++j)
    widen<LoadBf16>(static_cast<const char*>(rows) + j * stride, n, to + j * n);
}

void attend_block(const AttendArgs& a, const Keys& b) {
  int i = 0;
  for (; i + 3 <= a.n_queries; i += 3) attend_queries<3>(a, b, i);
  for (; i < a.n_queries; ++i) attend_queries<1>(a, b, i);
}

void attend_widened(const AttendArgs& a, const KeyBlock& block) {
  alignas(32) float keys[kMaxKeys * kMaxKeyDim], values[kMaxKeys * kMaxValueDim];
  float* const rope_keys = keys + kMaxKeys * a.dim;
  widen_rows(block.k, a.k_stride, block.n_keys, a.dim, keys);
  widen_rows(block.k_rope, a.k_rope_stride, block.n_keys, a.rope_dim, rope_keys);
  const bool same = block.v == block.k && a.v_dim <= a.dim;  // values are a prefix of the keys
  if (!same) widen_rows(block.v, a.v_stride, block.n_keys, a.v_dim, values);
  attend_block(a, {keys, rope_keys, same ? keys : values, a.dim, a.rope_dim, same ? a.dim : a.v_dim,
                   block.n_keys, block.visible});
}

}  // namespace

void avx2_attend(const AttendArgs& a) {
  for (int b = 0; b < a.n_blocks; ++b) {
    const KeyBlock& block = a.blocks[b];
    if (a.type == ActivationType::kBF16) {
      attend_widened(a, block);
    } else {
      attend_block(a, {static_cast<const float*>(block.k), static_cast<const float*>(block.k_rope),
                       static_cast<const float*>(block.v), a.k_stride / 4, a.k_rope_stride / 4,
                       a.v_stride / 4, block.n_keys, block.visible});
    }
  }
}

namespace {

void rms_norm(const RmsNormArgs& a) {
  __m256 acc[1][1] = {};
  accumulate<1, 1>(&a.x, a.x, 0, a.n, acc);
  const float scale = 1 / __builtin_sqrtf(sum_lanes(acc[0][0]) / static_cast<float>(a.n) + a.eps);
  const __m256 s = _mm256_set1_ps(scale);
  for (int i = 0; i < a.n; i += kLanes) {
    const __m256i mask = lane_mask(a.n - i);
    const __m256 x = _mm256_maskload_ps(a.x + i, mask), gain = _mm256_maskload_ps(a.gain + i, mask);
    _mm256_maskstore_ps(a.out + i, mask, _mm256_mul_ps(_mm256_mul_ps(x, s), gain));
  }
}

void silu_mul(const SiluMulArgs& a) {
  for (int64_t i = 0; i < a.n; i += kLanes) {
    const __m256i mask = lane_mask(static_cast<int>(a.n - i < kLanes ? a.n - i : kLanes));
    const __m256 gate = _mm256_maskload_ps(a.gate + i, mask),
                 up = _mm256_maskload_ps(a.up + i, mask);
    const __m256 below =
        _mm256_add_ps(_mm256_set1_ps(1), exp(_mm256_sub_ps(_mm256_setzero_ps(), gate)));
    _mm256_maskstore_ps(a.out + i, mask, _mm256_mul_ps(_mm256_div_ps(gate, below), up));
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

void encode_bf16(const EncodeBf16Args& a) {
  int64_t i = 0;
  for (; i + kLanes <= a.n; i += kLanes) {
    const __m256 x = _mm256_loadu_ps(a.from + i);
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    const __m256i upper =
        _mm256_srli_epi32(_mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(rounded),
                                                               _mm256_castsi256_ps(quiet), nan)),
                          16);
    const __m128i packed =
        _mm_packus_epi32(_mm256_castsi256_si128(upper), _mm256_extracti128_si256(upper, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(a.to + i), packed);
  }
  alignas(32) float tail[kLanes] = {};
  alignas(16) bf16 rounded[kLanes];
  if (i == a.n) return;
  __builtin_memcpy(tail, a.from + i, (a.n - i) * sizeof(float));
  encode_bf16({tail, rounded, kLanes});
  __builtin_memcpy(a.to + i, rounded, (a.n - i) * sizeof(bf16));
}

}  // namespace

void install_avx2_attention(KernelTable& t) {
  t.attend = avx2_attend;
  t.rms_norm = rms_norm;
  t.silu_mul = silu_mul;
  t.decode = decode;
  t.encode_bf16 = encode_bf16;
}

}  // namespace tandem::cpu
