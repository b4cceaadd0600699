// AMX products of BF16 activations with BF16 and FP8 weights. FP8 is widened exactly, block by
// block, in the level-1 cache.
#include "cpu_kernels/amx/tiles.h"
#include "cpu_kernels/avx512/e4m3.h"

namespace tandem::cpu {

void avx512_gemm(const GemmArgs&);
void amx_gemm_int8(const GemmArgs&);

namespace {

void gemm_by_tiles(const GemmArgs& a) {
  configure_tiles();
  Room<Bf16Product> room;
  const E4m3Table table;
  const int per_step = columns_of_step(a.w.type);
  multiply(a, {Bf16Product::kColumns}, [&](Block b, int first, int m, Sum* sums) {
    if (a.w.type == WeightType::kBF16) {
      tiles_in_place(b, per_step, room);
    } else {
      widen_tiles(b, per_step, room, [&](int, int, __m512i step, __m512i* w0, __m512i* w1) {
        widen_e4m3(table, step, w0, w1);
      });
    }
    add_tiles<Bf16Product>(a, b, first, m, sums, room);
  });
  _tile_release();
}

// Flushes subnormal numbers to zero, as tile products do regardless of MXCSR.
__m512 flush(__m512 v) {
  const __m512 least = _mm512_set1_ps(0x1p-126f);
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(_mm512_abs_ps(v), least, _CMP_NLT_UQ), v);
}

// Forms sums like TDPBF16PS according to Intel's manual, from +0: even and odd columns are summed
// separately with one rounding per product, then even + odd is added to the tile; subnormals are
// zero throughout. VDPBF16PS adds the odd product before the even one; with zero in place of either
// the other sum is unchanged, so the result is bit-identical to the tiles.
template <int M, int N>
struct TileSums {
  __m512 even[M][N] = {}, odd[M][N] = {}, all[M][N] = {};

  void add(int row, int panel, int pair, __m512i w) {
    const __m512i x = _mm512_set1_epi32(pair);
    const __m512i x_even = _mm512_and_si512(x, _mm512_set1_epi32(0xffff));
    const __m512i x_odd = _mm512_andnot_si512(_mm512_set1_epi32(0xffff), x);
    __m512 &e = even[row][panel], &o = odd[row][panel];
    e = _mm512_dpbf16_ps(e, (__m512bh)x_even, (__m512bh)w);
    o = _mm512_dpbf16_ps(o, (__m512bh)x_odd, (__m512bh)w);
  }
  void end_tile() {
    for (int i = 0; i < M; ++i)
      for (int p = 0; p < N; ++p) {
        const __m512 tile = flush(_mm512_add_ps(even[i][p], odd[i][p]));
        all[i][p] = flush(_mm512_add_ps(all[i][p], tile));
        even[i][p] = odd[i][p] = _mm512_setzero_ps();
      }
  }
};

int load_pair(const char* x) {
  int pair;
  __builtin_memcpy(&pair, x, sizeof(pair));
  return pair;
}

template <int M, int N>
void few_rows_bf16(const char* const* x, const Block& b, int panel, Sum* sums) {
  TileSums<M, N> acc;
  const int n_steps = (b.n + 1) / 2;
  for (int first = 0; first < n_steps; first += kStepsMultiple) {
    for (int s = first; s < min(n_steps, first + kStepsMultiple); ++s)
      for (int p = 0; p < N; ++p) {
        const char* from = b.w[panel + p] + s * kStepBytes;
        _mm_prefetch(b.ahead[panel + p] + s * kStepBytes, _MM_HINT_T0);
        const __m512i w = _mm512_load_si512(from);
        for (int i = 0; i < M; ++i) acc.add(i, p, load_pair(x[i] + s * 4), w);
      }
    acc.end_tile();
  }
  add_sums<M, N>(acc.all, b, panel, 0, sums);
}

template <int M, int N>
void few_rows_e4m3(const char* const* x, const Block& b, int panel, Sum* sums) {
  const E4m3Table table;
  TileSums<M, N> acc;
  const int n_steps = (b.n + 3) / 4, per_tile = kStepsMultiple / 2;
  for (int first = 0; first < n_steps; first += per_tile) {
    for (int s = first; s < min(n_steps, first + per_tile); ++s)
      for (int p = 0; p < N; ++p) {
        const char* from = b.w[panel + p] + s * kStepBytes;
        _mm_prefetch(b.ahead[panel + p] + s * kStepBytes, _MM_HINT_T0);
        __m512i w0, w1;
        widen_e4m3(table, _mm512_load_si512(from), &w0, &w1);
        for (int i = 0; i < M; ++i) {
          acc.add(i, p, load_pair(x[i] + s * 8), w0);
          acc.add(i, p, load_pair(x[i] + s * 8 + 4), w1);
        }
      }
    acc.end_tile();
  }
  add_sums<M, N>(acc.all, b, panel, 0, sums);
}

constexpr Tiles kFewBf16[kFewRows] = {{few_rows_bf16<1, 1>, few_rows_bf16<1, kGroup>},
                                      {few_rows_bf16<2, 1>, few_rows_bf16<2, kGroup>}};
constexpr Tiles kFewE4m3[kFewRows] = {{few_rows_e4m3<1, 1>, few_rows_e4m3<1, kGroup>},
                                      {few_rows_e4m3<2, 1>, few_rows_e4m3<2, kGroup>}};

void gemm_few_rows(const GemmArgs& a) {
  const bool bf16_weights = a.w.type == WeightType::kBF16;
  multiply(a, {Bf16Product::kColumns}, [&](const Block& b, int first, int m, Sum* sums) {
    add_rows(a, bf16_weights ? kFewBf16 : kFewE4m3, b, sizeof(bf16), first, m, sums);
  });
}

void gemm(const GemmArgs& a) {
  if (a.x.type == ActivationType::kF32) return avx512_gemm(a);
  if (a.x.type == ActivationType::kU8) return amx_gemm_int8(a);
  a.m > kFewRows ? gemm_by_tiles(a) : gemm_few_rows(a);
}

}  // namespace

// The other AVX-512 kernels with BF16 stay installed.
void install_amx(KernelTable& t) { t.gemm = gemm; }

}  // namespace tandem::cpu
