// The two products of attention with VDPBF16PS. Scores are [key][query]: a key takes the place of x
// in a product, broadcast 4 bytes at a time from the cache, and so does a row of weights.
#include "cpu_kernels/avx512/attention.h"

#include "cpu_kernels/avx512/panels.h"

namespace tandem::cpu {

void avx2_attend(const AttendArgs&);

namespace {

constexpr int kBlendedQueries = 4;

// Finds the rows of keys [key, key + M); the last key takes the place of missing ones.
template <int M>
void find_rows(const void* rows, int64_t stride, const KeyBlock& block, int key, const char** out) {
  out[0] = bytes(rows) + key * stride;
#pragma GCC unroll 16
  for (int i = 1; i < M; ++i) out[i] = out[i - 1] + (key + i < block.n_keys ? stride : 0);
}

// acc[i][p] += x[i] . w[p] over steps of two columns, for M rows and N panels.
template <int M, int N>
void multiply(const char* const* x, const PanelSteps* w, int n_steps, const Ahead& ahead,
              __m512 (&acc)[M][N]) {
  const char* fetched = ahead.at;
  for (int s = 0; s < n_steps; ++s, fetched += ahead.per_step) {
    _mm_prefetch(fetched, _MM_HINT_T1);
    __m512bh ws[N];
#pragma GCC unroll 8
    for (int p = 0; p < N; ++p) ws[p] = (__m512bh)_mm512_load_si512(w[s][p]);
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) {
      int pair;
      __builtin_memcpy(&pair, x[i] + s * 4, 4);
      const __m512bh xs = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 8
      for (int p = 0; p < N; ++p) acc[i][p] = _mm512_dpbf16_ps(acc[i][p], xs, ws[p]);
    }
  }
}

// Computes the scores of keys [key, key + M) for the queries of N panels. Not inlined, like
// blend(): the row addresses need all registers.
template <int M, int N>
[[gnu::noinline]] void score(const AttendArgs& a, const KeyBlock& block, const Ahead& ahead,
                             int key, int panel, float (*out)[kTogether], Scratch& s) {
  const char *k[M], *k_rope[M];
  find_rows<M>(block.k, a.k_stride, block, key, k);
  find_rows<M>(block.k_rope, a.k_rope_stride, block, key, k_rope);
  const PanelSteps* const q = s.queries[panel / kPanelsTogether];
  __m512 acc[M][N];
  clear(acc);
  multiply<M, N>(k, q, a.dim / 2, ahead, acc);
  multiply<M, N>(k_rope, q + rope_step(a), a.rope_dim / 2, {q[0][0], 0}, acc);
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
    for (int p = 0; p < N; ++p) _mm512_store_ps(out[key + i] + p * kPanelRows, acc[i][p]);
}

// Adds weights . values for the queries from `query` on and N panels of columns.
template <int N>
[[gnu::noinline]] void blend(int query, int column, int n_pairs, const Ahead& ahead, Scratch& s) {
  const char* weights[kBlendedQueries];
  for (int i = 0; i < kBlendedQueries; ++i) weights[i] = bytes(s.weights[query + i]);
  __m512 acc[kBlendedQueries][N];
#pragma GCC unroll 8
  for (int i = 0; i < kBlendedQueries; ++i)
#pragma GCC unroll 8
    for (int p = 0; p < N; ++p)
      acc[i][p] = _mm512_load_ps(s.out[query + i] + column + p * kPanelRows);
  multiply<kBlendedQueries, N>(weights, s.values, n_pairs, ahead, acc);
#pragma GCC unroll 8
  for (int i = 0; i < kBlendedQueries; ++i)
#pragma GCC unroll 8
    for (int p = 0; p < N; ++p)
      _mm512_store_ps(s.out[query + i] + column + p * kPanelRows, acc[i][p]);
}

// What call `call` of the n_calls of a product prefetches in n_steps steps: its part of block i of
// the next blocks. The scores fetch the first of the two and the weighted values the second, so
// that memory is read during both.
Ahead next_block(const AttendArgs& a, const Blocks& b, int i, int call, int n_calls, int n_steps) {
  if (!b.next) return {bytes(b.blocks->k), 0};
  const int64_t part = kMaxKeys * a.k_stride / n_calls;
  return {bytes(b.next[i].k) + call * part, part / n_steps + 1};
}

struct VectorProducts {
  template <int M, int N>
  static void score(const AttendArgs& a, const Blocks& b, int panel, Scratch& s) {
    const int last = min(b.n_queries, (panel + N) * kPanelRows) - 1;
    const int n_groups = (b.n_queries + kTogether - 1) / kTogether, n_calls = kSlots / M * n_groups;
    int call = panel / kPanelsTogether * (kSlots / M);
    for (int i = 0; i < b.n; ++i) {
      const int seen = keys_seen(b.blocks[i], s.token[last]);
      for (int key = 0; key < seen; key += M, ++call) {
        const Ahead ahead = next_block(a, b, 0, call, n_calls, a.dim / 2);
        cpu::score<M, N>(a, b.blocks[i], ahead, key, panel, s.scores + i * kMaxKeys, s);
      }
    }
  }

  // Fewer queries take more keys at a time: enough sums to hide the product's latency.
  static void score(const AttendArgs& a, const Blocks& b, int panel, Scratch& s) {
    const int left = b.n_queries - panel * kPanelRows;
    if (left <= kPanelRows) return score<16, 1>(a, b, panel, s);
    if (left <= 2 * kPanelRows) return score<8, 2>(a, b, panel, s);
    score<4, 4>(a, b, panel, s);
  }

  static void blend(const AttendArgs& a, const Blocks& b, int column, Scratch& s) {
    const auto tile =
        a.v_dim - column > 2 * kPanelRows ? cpu::blend<kPanelsTogether> : cpu::blend<2>;
    const int n_groups = (b.n_queries + kBlendedQueries - 1) / kBlendedQueries;
    const int n_calls = (a.v_dim + kTogether - 1) / kTogether * n_groups;
    int call = column / kTogether * n_groups;
    for (int query = 0; query < b.n_queries; query += kBlendedQueries, ++call)
      if (const int slots = slots_seen(b, s.token[query + kBlendedQueries - 1])) {
        const int n_pairs = (slots + 1) / 2;
        tile(query, column, n_pairs, next_block(a, b, kBlocks - 1, call, n_calls, n_pairs), s);
      }
  }
};

}  // namespace

void avx512_attend(const AttendArgs& a) {
  // Products multiply pairs of columns, so odd dimensions use AVX2.
  if (a.type == ActivationType::kF32 || a.dim % 2 != 0 || a.rope_dim % 2 != 0)
    return avx2_attend(a);
  attend_with<VectorProducts>(a);
}

void install_avx512_attention(KernelTable& t) {
  t.attention = ActivationType::kBF16;
  t.attend = avx512_attend;
}

}  // namespace tandem::cpu
