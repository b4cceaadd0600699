// BF16 attention with float sums, except its two products, which the including file provides with
// vectors or tiles (docs/cpu_attention.md). Queries are packed once, keys are read in place from
// the cache, values are packed a few columns at a time.
#pragma once
#include <immintrin.h>

#include "cpu_kernels/avx512/transpose.h"
#include "cpu_kernels/key_blocks.h"

namespace tandem::cpu {
namespace {

constexpr int kQueries = 128;  // packed together
constexpr int kQueryPanels = kQueries / kPanelRows;
constexpr int kMaxSteps = (kMaxKeyDim + 64) / 2;  // both parts padded to 32 columns
constexpr int kPairs = kSlots / 2;
constexpr int kTileKeys = 32;  // keys whose weights are computed together
// Panels of 16 queries, or of 16 columns of values, that are multiplied together.
constexpr int kPanelsTogether = 4, kTogether = kPanelsTogether * kPanelRows;
constexpr int kOutStride = kMaxValueDim + kPanelRows;  // not a power of 2: rows use all cache sets

// The same step of kPanelsTogether panels.
using PanelSteps = char[kPanelsTogether][kStepBytes];

struct Scratch {
  alignas(64) PanelSteps queries[kQueryPanels / kPanelsTogether][kMaxSteps];
  alignas(64) float scores[kSlots][kTogether];
  alignas(64) bf16 weights[kQueries][kPairs][2];  // exp(score - max)
  alignas(64) PanelSteps values[kPairs];
  alignas(64) float out[kQueries][kOutStride];
  alignas(64) float max[kQueries], sum[kQueries];
  alignas(64) int token[kQueries];  // a query sees visible + token keys of a block
};

// Mask of the first n of 32 lanes, for any n.
__mmask32 mask_of(int n) {
  if (n >= 32) return ~__mmask32{0};
  return (__mmask32{1} << (n < 0 ? 0 : n)) - 1;
}

// The step at which the rope part of packed queries begins.
int rope_step(const AttendArgs& a) { return (a.dim + 31) / 32 * 16; }

// Packs queries [n_queries, dim] into steps of 16 queries and two columns, from step `at` of each
// panel. The number of panels is rounded up to kPanelsTogether, padded with zeros.
void pack_queries(const float* q, int64_t stride, int n_queries, int dim, int at, Scratch& s) {
  const int n_panels = (n_queries + kTogether - 1) / kTogether * kPanelsTogether;
  for (int p = 0; p < n_panels; ++p)
    for (int c = 0; c < dim; c += 32) {
      __m512i words[16] = {};
      for (int i = 0; i < kPanelRows && p * kPanelRows + i < n_queries; ++i) {
        const float* from = q + (p * kPanelRows + i) * stride + c;
        const __mmask32 mask = mask_of(dim - c);
        const __m512 low = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), from);
        const __m512 high = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), from + 16);
        words[i] = (__m512i)_mm512_cvtne2ps_pbh(high, low);
        _mm_prefetch(from + 64, _MM_HINT_T0);
        _mm_prefetch(from + 80, _MM_HINT_T0);
      }
      transpose(words);
      for (int i = 0; i < 16; ++i)
        _mm512_store_si512(s.queries[p / kPanelsTogether][at + c / 2 + i][p % kPanelsTogether],
                           words[i]);
    }
}

// Packs columns [column, column + 64) of the values into steps of 16 columns and two keys. Missing
// keys and columns are zero.
void pack_values(const AttendArgs& a, const Blocks& b, int column, Scratch& s) {
  alignas(64) uint16_t order[2][32];
  for (int i = 0; i < 32; ++i) {
    order[0][i] = static_cast<uint16_t>(i / 2 + i % 2 * 32);
    order[1][i] = static_cast<uint16_t>(16 + i / 2 + i % 2 * 32);
  }
  const __m512i first = _mm512_load_si512(order[0]), second = _mm512_load_si512(order[1]);
  for (int p = 0; p < kPanelsTogether && column + p * kPanelRows < a.v_dim; p += 2) {
    const int c = column + p * kPanelRows;
    const __mmask32 mask = mask_of(a.v_dim - c);
    PanelSteps* to = s.values;
    for (int i = 0; i < b.n; ++i) {
      const char* from = bytes(b.blocks[i].v) + c * static_cast<int>(sizeof(bf16));
      const int n_keys = b.blocks[i].n_keys;
      for (int key = 0; key < kMaxKeys; key += 2, from += 2 * a.v_stride, ++to) {
        const __m512i even = _mm512_maskz_loadu_epi16(key < n_keys ? mask : 0, from);
        const __m512i odd =
            _mm512_maskz_loadu_epi16(key + 1 < n_keys ? mask : 0, from + a.v_stride);
        _mm512_store_si512((*to)[p], _mm512_permutex2var_epi16(even, first, odd));
        _mm512_store_si512((*to)[p + 1], _mm512_permutex2var_epi16(even, second, odd));
      }
    }
  }
}

// e^x within 2^-20 for x <= 0, at least 2^-126: 2^n times a polynomial that interpolates (2^r - 1)
// / r at the Chebyshev nodes of [-1/2, 1/2]. Interleaves N vectors step by step to hide latency.
template <int N>
[[gnu::always_inline]] inline void exp(__m512 (&x)[N]) {
  constexpr float kLog2E = 1.44269504088896341f;
  constexpr float kToInteger = 0x1.8p23f;  // adding it moves n to the lowest bits
  constexpr float kTerms[] = {9.666368515384533e-3f, 5.5503810137964744e-2f, 2.4022349038020385e-1f,
                              6.931471805599453e-1f, 1};
  const auto each = [](auto step) {
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) step(i);
  };
  __m512 n[N], p[N];
  each([&](int i) { x[i] = _mm512_mul_ps(x[i], _mm512_set1_ps(kLog2E)); });
  each([&](int i) { x[i] = _mm512_max_ps(x[i], _mm512_set1_ps(-126)); });
  each([&](int i) { n[i] = _mm512_add_ps(x[i], _mm512_set1_ps(kToInteger)); });
  each([&](int i) { p[i] = _mm512_sub_ps(n[i], _mm512_set1_ps(kToInteger)); });
  each([&](int i) { x[i] = _mm512_sub_ps(x[i], p[i]); });
  each([&](int i) { p[i] = _mm512_set1_ps(1.3381302537304018e-3f); });
#pragma GCC unroll 8
  for (const float term : kTerms)
    each([&](int i) { p[i] = _mm512_fmadd_ps(p[i], x[i], _mm512_set1_ps(term)); });
  each([&](int i) {
    const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(n[i]), 23);
    x[i] = _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p[i]), exponent));
  });
}

// The scores of 16 queries, [slot][16], with the number of keys of each block that they see.
struct Scores {
  const float (*at)[kTogether];
  int some[kBlocks], all[kBlocks];  // keys that at least one query sees, and that all see
  __m512i each[kBlocks];
};

Scores scores_of(const Blocks& b, int query, Scratch& s) {
  Scores scores;
  scores.at = reinterpret_cast<const float(*)[kTogether]>(&s.scores[0][query % (kTogether)]);
  const __m512i token = _mm512_load_si512(s.token + query);
  for (int i = 0; i < b.n; ++i) {
    const KeyBlock& block = b.blocks[i];
    scores.all[i] = keys_seen(block, s.token[query]);
    scores.some[i] = keys_seen(block, s.token[query + kPanelRows - 1]);
    scores.each[i] = _mm512_min_epi32(_mm512_add_epi32(token, _mm512_set1_epi32(block.visible)),
                                      _mm512_set1_epi32(block.n_keys));
  }
  return scores;
}

__mmask16 sees(const Scores& scores, int block, int key) {
  return _mm512_cmpgt_epi32_mask(scores.each[block], _mm512_set1_epi32(key));
}

__m512 largest(const Scores& scores, int n_blocks) {
  __m512 max = _mm512_set1_ps(-__builtin_inff()), odd = max;
  for (int b = 0; b < n_blocks; ++b) {
    const float(*at)[kTogether] = scores.at + b * kMaxKeys;
    int key = 0;
    for (; key + 1 < scores.all[b]; key += 2) {
      max = _mm512_max_ps(max, _mm512_load_ps(at[key]));
      odd = _mm512_max_ps(odd, _mm512_load_ps(at[key + 1]));
    }
    for (; key < scores.some[b]; ++key)
      max = _mm512_mask_max_ps(max, sees(scores, b, key), max, _mm512_load_ps(at[key]));
  }
  return _mm512_max_ps(max, odd);
}

// Computes the weights of 32 slots from `tile` on, as rows of pairs of keys; zero for keys that are
// not seen (none if kAll). Returns the sums of the rounded weights, so that the output is a mean
// regardless of rounding.
template <bool kAll>
__m512 weigh(const AttendArgs& a, const Scores& scores, int tile, __m512 max, int query,
             Scratch& s) {
  alignas(64) uint16_t order[32];
  for (int i = 0; i < 32; ++i) order[i] = static_cast<uint16_t>(i / 2 + i % 2 * 16);
  const __m512i interleaved = _mm512_load_si512(order);
  const __m512i ones = _mm512_set1_epi16(0x3f80);
  const __m512 scale = _mm512_set1_ps(a.scale);
  __m512 sum = _mm512_setzero_ps();
  __m512i pairs[16];
  for (int i = 0; i < kTileKeys; i += 4) {
    __m512 w[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j)
      w[j] = _mm512_fmsub_ps(_mm512_load_ps(scores.at[tile + i + j]), scale, max);
    exp(w);
    if constexpr (!kAll)
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j)
        w[j] = _mm512_maskz_mov_ps(sees(scores, tile / kMaxKeys, tile % kMaxKeys + i + j), w[j]);
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      pairs[i / 2 + j] = _mm512_permutexvar_epi16(
          interleaved, (__m512i)_mm512_cvtne2ps_pbh(w[2 * j + 1], w[2 * j]));
      sum = _mm512_dpbf16_ps(sum, (__m512bh)pairs[i / 2 + j], (__m512bh)ones);
    }
  }
  transpose(pairs);
  for (int i = 0; i < 16; ++i) _mm512_store_si512(s.weights[query + i][tile / 2], pairs[i]);
  return sum;
}

// Rescales the output of queries with a new maximum.
void rescale(const AttendArgs& a, int query, __mmask16 which, const float* shrink, Scratch& s) {
  for (int i = 0; i < kPanelRows; ++i) {
    if ((which >> i & 1) == 0) continue;
    const __m512 factor = _mm512_set1_ps(shrink[i]);
    for (int c = 0; c < a.v_dim; c += kPanelRows) {
      float* const out = s.out[query + i] + c;
      _mm512_store_ps(out, _mm512_mul_ps(_mm512_load_ps(out), factor));
    }
  }
}

// Turns the scores of 16 queries into weights, and updates maxima, sums and previous outputs.
void apply_softmax(const AttendArgs& a, const Blocks& b, int query, Scratch& s) {
  const Scores scores = scores_of(b, query, s);
  const __m512 before = _mm512_load_ps(s.max + query);
  const __m512 found = _mm512_mul_ps(largest(scores, b.n), _mm512_set1_ps(a.scale));
  const __m512 max = _mm512_max_ps(before, found);
  __m512 sum = _mm512_setzero_ps();
  for (int tile = 0; tile < b.n * kMaxKeys; tile += kTileKeys) {
    const bool all = scores.all[tile / kMaxKeys] >= tile % kMaxKeys + kTileKeys;
    const auto weigh_tile = all ? weigh<true> : weigh<false>;
    sum = _mm512_add_ps(sum, weigh_tile(a, scores, tile, max, query, s));
  }
  // A query that has seen no key has nothing to rescale.
  const __m512 nothing = _mm512_set1_ps(-__builtin_inff());
  const __mmask16 grown =
      _mm512_cmp_ps_mask(before, nothing, _CMP_GT_OQ) & _mm512_cmp_ps_mask(before, max, _CMP_LT_OQ);
  __m512 difference[1] = {_mm512_sub_ps(before, max)};
  exp(difference);
  const __m512 factor = _mm512_mask_mov_ps(_mm512_set1_ps(1), grown, difference[0]);
  alignas(64) float shrink[kPanelRows];
  _mm512_store_ps(shrink, factor);
  if (grown) rescale(a, query, grown, shrink, s);
  _mm512_store_ps(s.sum + query, _mm512_fmadd_ps(_mm512_load_ps(s.sum + query), factor, sum));
  _mm512_store_ps(s.max + query, max);
}

// Where to prefetch the keys of the next blocks, and how many bytes per step of a product: one
// burst would delay the product's own loads.
struct Ahead {
  const char* at;
  int64_t per_step;
};

// Packs queries [first, first + n) and loads their running maxima, sums and outputs.
void begin(const AttendArgs& a, int first, int n, Scratch& s) {
  pack_queries(a.q + first * a.q_stride, a.q_stride, n, a.dim, 0, s);
  pack_queries(a.q_rope + first * a.q_rope_stride, a.q_rope_stride, n, a.rope_dim, rope_step(a), s);
  for (int i = 0; i < kQueries; ++i) {
    const int query = first + min(i, n - 1);
    s.token[i] = (a.first_query + query) / a.queries_per_token;
    s.max[i] = a.max[query];
    s.sum[i] = a.sum[query];
    if (i < n)
      __builtin_memcpy(s.out[i], a.out + query * a.out_stride, a.v_dim * sizeof(float));
    else
      __builtin_memset(s.out[i], 0, a.v_dim * sizeof(float));
  }
}

void end(const AttendArgs& a, int first, int n, const Scratch& s) {
  __builtin_memcpy(a.max + first, s.max, n * sizeof(float));
  __builtin_memcpy(a.sum + first, s.sum, n * sizeof(float));
  for (int i = 0; i < n; ++i)
    __builtin_memcpy(a.out + (first + i) * a.out_stride, s.out[i], a.v_dim * sizeof(float));
}

// Products::score(a, blocks, panel, s) computes the scores of kPanelsTogether panels of queries for
// all slots that any of them sees. Products::blend(a, blocks, column, s) adds weights . values to
// s.out for the columns in s.values, which begin at `column`.
template <class Products>
void attend_blocks(const AttendArgs& a, const Blocks& b, Scratch& s) {
  if (slots_seen(b, s.token[b.n_queries - 1]) == 0) return;
  for (int panel = 0; panel * kPanelRows < b.n_queries; panel += kPanelsTogether) {
    Products::score(a, b, panel, s);
    const int end = min(b.n_queries, (panel + kPanelsTogether) * kPanelRows);
    for (int query = panel * kPanelRows; query < end; query += kPanelRows)
      apply_softmax(a, b, query, s);
  }
  for (int column = 0; column < a.v_dim; column += kTogether) {
    pack_values(a, b, column, s);
    Products::blend(a, b, column, s);
  }
}

template <class Products>
void attend_with(const AttendArgs& a) {
  Scratch s;
  for (int first = 0; first < a.n_queries; first += kQueries) {
    const int n = min(kQueries, a.n_queries - first);
    begin(a, first, n, s);
    for (int i = 0; i < a.n_blocks; i += kBlocks) attend_blocks<Products>(a, blocks_at(a, i, n), s);
    end(a, first, n, s);
  }
}

}  // namespace
}  // namespace tandem::cpu
