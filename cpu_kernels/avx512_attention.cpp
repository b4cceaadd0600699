// Attention in BF16 with float sums: both products are those of VDPBF16PS over panels, the keys of
// a block (16 keys a panel) and its values (16 columns a panel, two keys a step), which are packed
// once for all queries.
#include "cpu_kernels/avx512_bf16.h"
#include "cpu_kernels/avx512_transpose.h"

namespace tandem::cpu {

void avx2_attend(const AttendArgs&);

namespace {

constexpr int kKeyPanels = kMaxKeys / kPanelRows;
constexpr int kMaxDim = kMaxBf16Key + 64;  // both parts filled up to 32 columns
constexpr int kQueries = 32;               // whose scores are kept
constexpr int kTileRows = 6;

// The block in the layout of panels; what is not there is zero.
struct PackedBlock {
  alignas(64) char keys[kKeyPanels][kMaxDim / 2 * kStepBytes];
  alignas(64) char values[kMaxBf16Value / kPanelRows][kMaxKeys / 2 * kStepBytes];
};

const char* row(const void* rows, int64_t stride, int i) { return bytes(rows) + i * stride; }

// The first n of 32 BF16 numbers.
__mmask32 mask_of(int n) { return n >= 32 ? ~__mmask32{0} : (__mmask32{1} << (n < 0 ? 0 : n)) - 1; }

// [keys, dim] to steps of 16 keys and two columns, from step `at` of each panel on.
void pack_keys(const void* k, int64_t stride, int n_keys, int dim, int at, PackedBlock& to) {
  for (int p = 0; p < kKeyPanels; ++p)
    for (int c = 0; c < dim; c += 32) {
      __m512i words[16] = {};
      for (int i = 0; i < kPanelRows && p * kPanelRows + i < n_keys; ++i)
        words[i] = _mm512_maskz_loadu_epi16(mask_of(dim - c),
                                            row(k, stride, p * kPanelRows + i) + c * sizeof(bf16));
      transpose(words);
      for (int i = 0; i < 16; ++i)
        _mm512_store_si512(to.keys[p] + (at + c / 2 + i) * kStepBytes, words[i]);
    }
}

// [keys, v_dim] to steps of 16 columns and two keys.
void pack_values(const void* v, int64_t stride, int n_keys, int v_dim, PackedBlock& to) {
  alignas(64) uint16_t order[2][32];
  for (int i = 0; i < 32; ++i) {
    order[0][i] = static_cast<uint16_t>(i / 2 + i % 2 * 32);
    order[1][i] = static_cast<uint16_t>(16 + i / 2 + i % 2 * 32);
  }
  const __m512i first = _mm512_load_si512(order[0]), second = _mm512_load_si512(order[1]);
  for (int j = 0; j < kMaxKeys; j += 2)
    for (int c = 0; c < v_dim; c += 32) {
      const __mmask32 mask = mask_of(v_dim - c);
      __m512i even = _mm512_setzero_si512(), odd = even;
      if (j < n_keys) even = _mm512_maskz_loadu_epi16(mask, row(v, stride, j) + c * sizeof(bf16));
      if (j + 1 < n_keys)
        odd = _mm512_maskz_loadu_epi16(mask, row(v, stride, j + 1) + c * sizeof(bf16));
      char* const step = to.values[c / kPanelRows] + j / 2 * kStepBytes;
      _mm512_store_si512(step, _mm512_permutex2var_epi16(even, first, odd));
      if (c + kPanelRows < v_dim)
        _mm512_store_si512(step + sizeof(to.values[0]),
                           _mm512_permutex2var_epi16(even, second, odd));
    }
}

// e^x within 2 ulp for x <= 0; 0 below -87. The polynomial of Cephes' expf.
__m512 exp(__m512 x) {
  const __mmask16 counts = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.f), _CMP_GE_OQ);
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)),
                                        _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  constexpr float kTerms[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f,
                              1.6666665459e-1f, 5.0000001201e-1f};
  for (const float c : kTerms) p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  p = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r), _mm512_set1_ps(1));
  return _mm512_maskz_scalef_ps(counts, p, n);
}

// ---------------------------------------------------------------------------------------

struct Queries {
  alignas(64) float scores[kQueries][kMaxKeys];
  alignas(64) bf16 weights[kQueries][kMaxKeys];  // exp(score - max)
  float shrink[kQueries];                        // of what was summed before
};

template <int M>
void score(const AttendArgs& a, int query, const PackedBlock& block, float (*scores)[kMaxKeys]) {
  const char *q[M], *q_rope[M], *k[kKeyPanels], *k_rope[kKeyPanels];
  for (int i = 0; i < M; ++i) {
    q[i] = row(a.q, a.q_stride, query + i);
    q_rope[i] = row(a.q_rope, a.q_rope_stride, query + i);
  }
  const int steps = (a.dim + 31) / 32 * 16;
  for (int p = 0; p < kKeyPanels; ++p) {
    k[p] = block.keys[p];
    k_rope[p] = block.keys[p] + steps * kStepBytes;
  }
  __m512 acc[M][kKeyPanels];
  clear(acc);
  add_products<M, kKeyPanels>(q, k, (a.dim + 1) / 2, acc);
  add_products<M, kKeyPanels>(q_rope, k_rope, (a.rope_dim + 1) / 2, acc);
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
    for (int p = 0; p < kKeyPanels; ++p) _mm512_store_ps(scores[i] + p * kPanelRows, acc[i][p]);
}

// Turns the scores of one query into weights and updates its maximum and sum.
void soften(const AttendArgs& a, int query, int i, Queries& s) {
  const int limit = a.visible + (a.first_query + query) / a.queries_per_token;
  const int visible = limit < a.n_keys ? limit : a.n_keys;
  if (visible <= 0) {
    s.shrink[i] = 1;
    __builtin_memset(s.weights[i], 0, sizeof(s.weights[i]));
    return;
  }
  const __m512 scale = _mm512_set1_ps(a.scale);
  __m512 scores[kKeyPanels], top = _mm512_set1_ps(a.max[query]);
  __mmask16 seen[kKeyPanels];
  for (int p = 0; p < kKeyPanels; ++p) {
    seen[p] = static_cast<__mmask16>(mask_of(visible - p * kPanelRows));
    scores[p] = _mm512_mul_ps(_mm512_load_ps(s.scores[i] + p * kPanelRows), scale);
    top = _mm512_mask_max_ps(top, seen[p], top, scores[p]);
  }
  const float max = _mm512_reduce_max_ps(top);
  __m512 sum = _mm512_setzero_ps();
  for (int p = 0; p < kKeyPanels; ++p) {
    const __m512 difference = _mm512_maskz_sub_ps(seen[p], scores[p], _mm512_set1_ps(max));
    const __m512 weight = _mm512_maskz_mov_ps(seen[p], exp(difference));
    sum = _mm512_add_ps(sum, weight);
    _mm256_store_si256(reinterpret_cast<__m256i*>(s.weights[i] + p * kPanelRows),
                       (__m256i)_mm512_cvtneps_pbh(weight));
  }
  s.shrink[i] = _mm512_cvtss_f32(exp(_mm512_set1_ps(a.max[query] - max)));
  a.sum[query] = a.sum[query] * s.shrink[i] + _mm512_reduce_add_ps(sum);
  a.max[query] = max;
}

// out = out * shrink + weights . values
template <int M>
void blend(const AttendArgs& a, int query, const PackedBlock& block, const Queries& s, int i) {
  constexpr int kN = 4;
  const char* weights[M];
  for (int r = 0; r < M; ++r) weights[r] = reinterpret_cast<const char*>(s.weights[i + r]);
  for (int c = 0; c < a.v_dim; c += kN * kPanelRows) {
    const char* v[kN];
    __mmask16 mask[kN];
    for (int p = 0; p < kN; ++p) {
      v[p] = block.values[c / kPanelRows + p];
      mask[p] = static_cast<__mmask16>(mask_of(a.v_dim - c - p * kPanelRows));
    }
    __m512 acc[M][kN];
#pragma GCC unroll 8
    for (int r = 0; r < M; ++r)
#pragma GCC unroll 8
      for (int p = 0; p < kN; ++p) {
        const float* out = a.out + (query + r) * a.out_stride + c + p * kPanelRows;
        acc[r][p] =
            _mm512_mul_ps(_mm512_maskz_loadu_ps(mask[p], out), _mm512_set1_ps(s.shrink[i + r]));
      }
    add_products<M, kN>(weights, v, (a.n_keys + 1) / 2, acc);
#pragma GCC unroll 8
    for (int r = 0; r < M; ++r)
#pragma GCC unroll 8
      for (int p = 0; p < kN; ++p) {
        float* out = a.out + (query + r) * a.out_stride + c + p * kPanelRows;
        _mm512_mask_storeu_ps(out, mask[p], acc[r][p]);
      }
  }
}

using Score = void (*)(const AttendArgs&, int, const PackedBlock&, float (*)[kMaxKeys]);
using Blend = void (*)(const AttendArgs&, int, const PackedBlock&, const Queries&, int);
constexpr Score kScore[kTileRows] = {score<1>, score<2>, score<3>, score<4>, score<5>, score<6>};
constexpr Blend kBlend[kTileRows] = {blend<1>, blend<2>, blend<3>, blend<4>, blend<5>, blend<6>};

void attend_bf16(const AttendArgs& a) {
  PackedBlock block;
  Queries s;
  pack_keys(a.k, a.k_stride, a.n_keys, a.dim, 0, block);
  pack_keys(a.k_rope, a.k_rope_stride, a.n_keys, a.rope_dim, (a.dim + 31) / 32 * 16, block);
  pack_values(a.v, a.v_stride, a.n_keys, a.v_dim, block);
  for (int query = 0; query < a.n_queries; query += kQueries) {
    const int n = min(kQueries, a.n_queries - query);
    for (int i = 0; i < n; i += kTileRows)
      kScore[min(kTileRows, n - i) - 1](a, query + i, block, s.scores + i);
    for (int i = 0; i < n; ++i) soften(a, query + i, i, s);
    for (int i = 0; i < n; i += kTileRows)
      kBlend[min(kTileRows, n - i) - 1](a, query + i, block, s, i);
  }
}

void attend(const AttendArgs& a) {
  a.type == ActivationType::kF32 ? avx2_attend(a) : attend_bf16(a);
}

}  // namespace

void install_avx512_attention(KernelTable& t) {
  t.attention = ActivationType::kBF16;
  t.attend = attend;
}

}  // namespace tandem::cpu
