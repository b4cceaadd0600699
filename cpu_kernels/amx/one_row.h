// One row of BF16 activations with BF16 and FP8 weights, by vectors: memory is read a tenth faster
// so than by tiles. The sums have the order and the bits of TDPBF16PS (Intel's manual, volume 2):
// even and odd columns are summed separately, from +0, with one rounding a product. Then even + odd
// is rounded and added to the tile, 32 columns. Subnormal numbers are zero throughout.
#pragma once
#include "cpu_kernels/amx/e4m3.h"
#include "cpu_kernels/avx512/one_row.h"

namespace tandem::cpu {
namespace {

constexpr int kPartColumns = 128;  // summed together where no scale changes
constexpr int kTileColumns = 32;

// The sums of 16 rows of w: of a tile's even and odd columns, and of the tiles before.
struct TileSums {
  __m512 even, odd, all;
};

__m512 floats(const TileSums& sums) { return sums.all; }

// Two columns of a row of x.
int load_pair(const char* x) {
  int pair;
  __builtin_memcpy(&pair, x, sizeof(pair));
  return pair;
}

// Flushes subnormal numbers to zero, as tile products do regardless of MXCSR.
__m512 flush(__m512 v) {
  const __m512 least = _mm512_set1_ps(0x1p-126f);
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(_mm512_abs_ps(v), least, _CMP_NLT_UQ), v);
}

// Adds two columns. VDPBF16PS adds the odd product before the even one, and flushes as tiles do;
// with zero in place of either, the other sum is unchanged.
[[gnu::always_inline]] inline void add_pair(int pair, __m512i w, TileSums& sums) {
  const __m512i x = _mm512_set1_epi32(pair);
  const __m512i x_even = _mm512_and_si512(x, _mm512_set1_epi32(0xffff));
  const __m512i x_odd = _mm512_andnot_si512(_mm512_set1_epi32(0xffff), x);
  sums.even = _mm512_dpbf16_ps(sums.even, (__m512bh)x_even, (__m512bh)w);
  sums.odd = _mm512_dpbf16_ps(sums.odd, (__m512bh)x_odd, (__m512bh)w);
}

[[gnu::always_inline]] inline void end_tile_of(TileSums& sums) {
  const __m512 tile = flush(_mm512_add_ps(sums.even, sums.odd));
  sums = {_mm512_setzero_ps(), _mm512_setzero_ps(), flush(_mm512_add_ps(sums.all, tile))};
}

// Any number of panels and any row of x: the loops of panels.h.
template <WeightType kType, int N>
void one_row(const char* const* x, const Block& b, int panel, Sum* sums) {
  constexpr int kColumns = columns_of_step(kType), kStepsOfTile = kTileColumns / kColumns;
  const E4m3Table table;
  TileSums part[N] = {};
  const int n_steps = (b.n + kColumns - 1) / kColumns;
  for (int s = 0; s < n_steps; ++s) {
    const char* const xs = x[0] + s * kColumns * sizeof(bf16);
    for (int p = 0; p < N; ++p) {
      fetch_weights(b.ahead[panel + p] + s * kStepBytes);
      const __m512i w = _mm512_load_si512(b.w[panel + p] + s * kStepBytes);
      if constexpr (kType == WeightType::kBF16) {
        add_pair(load_pair(xs), w, part[p]);
      } else {
        __m512i w0, w1;
        widen_e4m3_step(table, w, &w0, &w1);
        add_pair(load_pair(xs), w0, part[p]);
        add_pair(load_pair(xs + 4), w1, part[p]);
      }
    }
    if ((s + 1) % kStepsOfTile == 0 || s + 1 == n_steps)
      for (TileSums& of_panel : part) end_tile_of(of_panel);
  }
  __m512 all[1][N];
  for (int p = 0; p < N; ++p) all[0][p] = part[p].all;
  add_sums<1, N>(all, b, panel, 0, sums);
}

template <WeightType kType>
constexpr Tiles kOneRow[1] = {{one_row<kType, 1>, one_row<kType, kGroup>}};

// Whole groups of panels, the loop of avx512/one_row.h.
template <WeightType kStored>
struct TileRow : RowFormat {
  using Vector = TileSums;
  static constexpr WeightType kType = kStored;
  static constexpr int kColumns = kPartColumns, kAhead = kAheadOfFew,
                       kXBytes = columns_of_step(kType) * sizeof(bf16),
                       kTileBytes = kTileColumns / columns_of_step(kType) * kStepBytes;
};

struct TileRowOfBf16 : TileRow<WeightType::kBF16> {
  static constexpr ScalesOf kScales = ScalesOf::kNothing;

  [[gnu::always_inline]] void add(const char* x, const char* w, int64_t stride,
                                  Vector* sums) const {
#pragma GCC unroll 4
    for (int p = 0; p < kGroup; ++p)
      add_pair(load_pair(x), _mm512_load_si512(w + p * stride), sums[p]);
  }
  [[gnu::always_inline]] void end_tile(Vector* sums) const {
#pragma GCC unroll 4
    for (int p = 0; p < kGroup; ++p) end_tile_of(sums[p]);
  }
};

// FP8 by multiply-adds of floats, of which a Xeon starts five while it starts one VDPBF16PS.
// Numbers of x must be moderate().
struct TileRowOfE4m3 : TileRow<WeightType::kF8E4M3> {
  static constexpr ScalesOf kScales = ScalesOf::kPanels;
  static constexpr int kLevel = 1;
  E4m3Table table;

  // The first and the second of two neighbouring columns as floats.
  static __m512 first(__m512i pairs) { return (__m512)_mm512_slli_epi32(pairs, 16); }
  static __m512 second(__m512i pairs) {
    return (__m512)_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000)));
  }

  [[gnu::always_inline]] void add(const char* x, const char* w, int64_t stride,
                                  Vector* sums) const {
    const __m512i x0 = _mm512_set1_epi32(load_pair(x)), x1 = _mm512_set1_epi32(load_pair(x + 4));
    const __m512 even0 = first(x0), odd0 = second(x0), even1 = first(x1), odd1 = second(x1);
#pragma GCC unroll 4
    for (int p = 0; p < kGroup; ++p) {
      __m512i w0, w1;
      widen_e4m3_step(table, _mm512_load_si512(w + p * stride), &w0, &w1);
      sums[p].even = _mm512_fmadd_ps(even0, first(w0), sums[p].even);
      sums[p].odd = _mm512_fmadd_ps(odd0, second(w0), sums[p].odd);
      sums[p].even = _mm512_fmadd_ps(even1, first(w1), sums[p].even);
      sums[p].odd = _mm512_fmadd_ps(odd1, second(w1), sums[p].odd);
    }
  }
  [[gnu::always_inline]] void end_tile(Vector* sums) const {
#pragma GCC unroll 4
    for (int p = 0; p < kGroup; ++p)
      sums[p] = {_mm512_setzero_ps(), _mm512_setzero_ps(),
                 _mm512_add_ps(sums[p].all, _mm512_add_ps(sums[p].even, sums[p].odd))};
  }
};

// Whether each of k numbers of x is 0 or between 2^-60 and 2^60. Products with E4M3 numbers, which
// are multiples of 2^-9, are then multiples of 2^-76, and so are their rounded sums: none of them
// is subnormal, and none overflows.
bool moderate(const char* x, int k) {
  const __m512i least = _mm512_set1_epi16((127 - 60) << 7), n = _mm512_set1_epi16(120 << 7);
  for (int c = 0; c < k; c += 32) {
    const __m512i size =
        _mm512_and_si512(_mm512_loadu_si512(x + c * sizeof(bf16)), _mm512_set1_epi16(0x7fff));
    if (_mm512_mask_cmpge_epu16_mask(_mm512_test_epi16_mask(size, size),
                                     _mm512_sub_epi16(size, least), n))
      return false;
  }
  return true;
}

void gemm_one_row(const GemmArgs& a) {
  const bool bf16_weights = a.w.type == WeightType::kBF16;
  if (bf16_weights && multiply_one_row<TileRowOfBf16>(a)) return;
  if (!bf16_weights && moderate(x_row(a.x, 0), a.k) && multiply_one_row<TileRowOfE4m3>(a)) return;
  multiply(a, {kPartColumns}, [&](const Block& b, int first, int m, Sum* sums) {
    add_rows(a, bf16_weights ? kOneRow<WeightType::kBF16> : kOneRow<WeightType::kF8E4M3>, b,
             sizeof(bf16), first, m, sums);
  });
}

}  // namespace
}  // namespace tandem::cpu
