// Attention in BF16 with float sums, both products by VDPBF16PS. The queries are packed once into
// panels (16 queries, two columns a step) and multiplied with the keys as they lie in the cache, so
// that scores come as [key][query] and the softmax runs over lanes. Values are packed block by
// block (16 columns a panel, two keys a step).
#include "cpu_kernels/avx512_bf16.h"
#include "cpu_kernels/avx512_transpose.h"

namespace tandem::cpu {

void avx2_attend(const AttendArgs&);

namespace {

constexpr int kQueries = 128;  // packed together
constexpr int kQueryPanels = kQueries / kPanelRows;
constexpr int kMaxSteps = (kMaxKeyDim + 64) / 2;  // both parts filled up to 32 columns
constexpr int kPairs = kMaxKeys / 2;
constexpr int kTileRows = 8;

struct Scratch {
  alignas(64) char queries[kQueryPanels][kMaxSteps * kStepBytes];
  alignas(64) char values[kMaxValueDim / kPanelRows][kPairs * kStepBytes];
  alignas(64) float scores[kMaxKeys][kQueries];
  alignas(64) bf16 weights[kPairs][kQueries][2];  // exp(score - max), of two keys
  alignas(64) float shrink[kQueries];             // of what was summed before
};

// The first n of 32 lanes, n of any size.
__mmask32 mask_of(int n) {
  if (n >= 32) return ~__mmask32{0};
  return (__mmask32{1} << (n < 0 ? 0 : n)) - 1;
}

// ------------------------------------------------------------------------------- packing

// [queries, dim] to steps of 16 queries and two columns, from step `at` of each panel on; pairs of
// panels are filled up with zeros.
void pack_queries(const float* q, int64_t stride, int n_queries, int dim, int at, Scratch& s) {
  const int n_panels = (n_queries + 2 * kPanelRows - 1) / (2 * kPanelRows) * 2;
  for (int p = 0; p < n_panels; ++p)
    for (int c = 0; c < dim; c += 32) {
      __m512i words[16] = {};
      for (int i = 0; i < kPanelRows && p * kPanelRows + i < n_queries; ++i) {
        const float* from = q + (p * kPanelRows + i) * stride + c;
        const __mmask32 mask = mask_of(dim - c);
        const __m512 low = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), from);
        const __m512 high = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), from + 16);
        words[i] = (__m512i)_mm512_cvtne2ps_pbh(high, low);
      }
      transpose(words);
      for (int i = 0; i < 16; ++i)
        _mm512_store_si512(s.queries[p] + (at + c / 2 + i) * kStepBytes, words[i]);
    }
}

// [keys, v_dim] to steps of 16 columns and two keys; keys that are not there are zero.
void pack_values(const AttendArgs& a, const KeyBlock& block, Scratch& s) {
  alignas(64) uint16_t order[2][32];
  for (int i = 0; i < 32; ++i) {
    order[0][i] = static_cast<uint16_t>(i / 2 + i % 2 * 32);
    order[1][i] = static_cast<uint16_t>(16 + i / 2 + i % 2 * 32);
  }
  const __m512i first = _mm512_load_si512(order[0]), second = _mm512_load_si512(order[1]);
  for (int j = 0; j < block.n_keys; j += 2)
    for (int c = 0; c < a.v_dim; c += 32) {
      const char* from = bytes(block.v) + j * a.v_stride + c * static_cast<int>(sizeof(bf16));
      const __mmask32 mask = mask_of(a.v_dim - c);
      const __m512i even = _mm512_maskz_loadu_epi16(mask, from);
      const __m512i odd =
          _mm512_maskz_loadu_epi16(j + 1 < block.n_keys ? mask : 0, from + a.v_stride);
      char* const step = s.values[c / kPanelRows] + j / 2 * kStepBytes;
      _mm512_store_si512(step, _mm512_permutex2var_epi16(even, first, odd));
      _mm512_store_si512(step + sizeof(s.values[0]), _mm512_permutex2var_epi16(even, second, odd));
    }
}

// -------------------------------------------------------------------------------- scores

// Scores of M keys and the 32 queries of two panels. Not inlined, like blend(): the addresses of
// the rows need all registers.
template <int M>
[[gnu::noinline]] void score(const AttendArgs& a, const KeyBlock& block, int key, int panel,
                             Scratch& s) {
  const char *k[M], *k_rope[M];
  for (int i = 0; i < M; ++i) {
    k[i] = bytes(block.k) + (key + i) * a.k_stride;
    k_rope[i] = bytes(block.k_rope) + (key + i) * a.k_rope_stride;
  }
  const char *q[2], *q_rope[2];
  for (int p = 0; p < 2; ++p) {
    q[p] = s.queries[panel + p];
    q_rope[p] = q[p] + (a.dim + 31) / 32 * 16 * kStepBytes;
  }
  __m512 acc[M][2];
  clear(acc);
  add_products<M, 2>(k, q, a.dim / 2, acc);
  add_products<M, 2>(k_rope, q_rope, a.rope_dim / 2, acc);
  const __m512 scale = _mm512_set1_ps(a.scale);
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
    for (int p = 0; p < 2; ++p)
      _mm512_store_ps(s.scores[key + i] + (panel + p) * kPanelRows,
                      _mm512_mul_ps(acc[i][p], scale));
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

// How many keys each of 16 queries sees.
__m512i keys_seen(const AttendArgs& a, const KeyBlock& block, int query) {
  alignas(64) int seen[16];
  for (int i = 0; i < 16; ++i) {
    const int limit = block.visible + (a.first_query + query + i) / a.queries_per_token;
    seen[i] = min(limit < 0 ? 0 : limit, block.n_keys);
  }
  return _mm512_load_si512(seen);
}

// Turns the scores of 16 queries into weights, in pairs of keys, and updates maxima and sums. `n`
// of the queries exist.
void soften(const AttendArgs& a, const KeyBlock& block, int first, int query, int n, Scratch& s) {
  const auto exists = static_cast<__mmask16>(mask_of(n));
  const __m512i seen = keys_seen(a, block, first + query);
  const __m512 before = _mm512_maskz_loadu_ps(exists, a.max + first + query);
  const auto sees = [&](int key) { return _mm512_cmpgt_epi32_mask(seen, _mm512_set1_epi32(key)); };
  __m512 max = before;
  for (int j = 0; j < block.n_keys; ++j)
    max = _mm512_mask_max_ps(max, sees(j), max, _mm512_load_ps(s.scores[j] + query));

  __m512 sum = _mm512_setzero_ps();
  const auto weight = [&](int key) {
    if (key >= block.n_keys) return _mm512_setzero_ps();
    const __m512 difference = _mm512_sub_ps(_mm512_load_ps(s.scores[key] + query), max);
    return _mm512_maskz_mov_ps(sees(key), exp(difference));
  };
  for (int j = 0; j < block.n_keys; j += 2) {
    const __m512 even = weight(j), odd = weight(j + 1);
    sum = _mm512_add_ps(sum, _mm512_add_ps(even, odd));
    const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(even));
    const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(odd));
    _mm512_store_si512(s.weights[j / 2][query], _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
  }
  // A query that has seen nothing yet keeps its maximum of -infinity.
  const __mmask16 some = _mm512_cmpgt_epi32_mask(seen, _mm512_setzero_si512());
  const __m512 shrink =
      _mm512_mask_mov_ps(_mm512_set1_ps(1), some, exp(_mm512_sub_ps(before, max)));
  _mm512_store_ps(s.shrink + query, shrink);
  const __m512 sum_before = _mm512_maskz_loadu_ps(exists, a.sum + first + query);
  _mm512_mask_storeu_ps(a.sum + first + query, exists, _mm512_fmadd_ps(sum_before, shrink, sum));
  _mm512_mask_storeu_ps(a.max + first + query, exists, max);
}

// out = out * shrink + weights . values for M queries and 32 columns.
template <int M>
[[gnu::noinline]] void blend(const AttendArgs& a, const KeyBlock& block, int first, int query,
                             int column, Scratch& s) {
  const char *weights[M], *v[2];
  __mmask16 mask[2];
  for (int i = 0; i < M; ++i) weights[i] = bytes(s.weights[0][query + i]);
  for (int p = 0; p < 2; ++p) {
    v[p] = s.values[column / kPanelRows + p];
    mask[p] = static_cast<__mmask16>(mask_of(a.v_dim - column - p * kPanelRows));
  }
  __m512 acc[M][2];
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
    for (int p = 0; p < 2; ++p) {
      const float* out = a.out + (first + query + i) * a.out_stride + column + p * kPanelRows;
      acc[i][p] =
          _mm512_mul_ps(_mm512_maskz_loadu_ps(mask[p], out), _mm512_set1_ps(s.shrink[query + i]));
    }
  add_products<M, 2, sizeof(s.weights[0])>(weights, v, (block.n_keys + 1) / 2, acc);
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
    for (int p = 0; p < 2; ++p) {
      float* out = a.out + (first + query + i) * a.out_stride + column + p * kPanelRows;
      _mm512_mask_storeu_ps(out, mask[p], acc[i][p]);
    }
}

// Calls work<8>(i) for eights of [0, n), then work<1>(i) for each of the rest.
template <class Eights, class Ones>
void by_eights(int n, Eights eights, Ones ones) {
  int i = 0;
  for (; i + kTileRows <= n; i += kTileRows) eights(i);
  for (; i < n; ++i) ones(i);
}

// Queries [first, first + n) with one block.
void attend_block(const AttendArgs& a, const KeyBlock& block, int first, int n, Scratch& s) {
  const int last = first + n - 1;
  if (block.visible + (a.first_query + last) / a.queries_per_token <= 0) return;
  for (int panel = 0; panel * kPanelRows < n; panel += 2)
    by_eights(
        block.n_keys, [&](int key) { score<kTileRows>(a, block, key, panel, s); },
        [&](int key) { score<1>(a, block, key, panel, s); });
  for (int query = 0; query < n; query += kPanelRows) soften(a, block, first, query, n - query, s);
  pack_values(a, block, s);
  for (int column = 0; column < a.v_dim; column += 2 * kPanelRows)
    by_eights(
        n, [&](int query) { blend<kTileRows>(a, block, first, query, column, s); },
        [&](int query) { blend<1>(a, block, first, query, column, s); });
}

void attend(const AttendArgs& a) {
  // An odd dimension does not come in pairs of columns.
  if (a.type == ActivationType::kF32 || a.dim % 2 != 0 || a.rope_dim % 2 != 0)
    return avx2_attend(a);
  Scratch s;
  for (int first = 0; first < a.n_queries; first += kQueries) {
    const int n = min(kQueries, a.n_queries - first);
    pack_queries(a.q + first * a.q_stride, a.q_stride, n, a.dim, 0, s);
    pack_queries(a.q_rope + first * a.q_rope_stride, a.q_rope_stride, n, a.rope_dim,
                 (a.dim + 31) / 32 * 16, s);
    for (int b = 0; b < a.n_blocks; ++b) attend_block(a, a.blocks[b], first, n, s);
  }
}

}  // namespace

void install_avx512_attention(KernelTable& t) {
  t.attention = ActivationType::kBF16;
  t.attend = attend;
}

}  // namespace tandem::cpu
