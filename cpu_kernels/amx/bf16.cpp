// AMX products of BF16 activations with BF16 and FP8 weights. FP8 is widened exactly, block by
// block, in the level-1 cache.
#include "cpu_kernels/amx/tiles.h"
#include "cpu_kernels/avx512/e4m3.h"

namespace tandem::cpu {

void avx512_gemm(const GemmArgs&);
void amx_gemm_int8(const GemmArgs&);

namespace {

// Widens one FP8 step to two BF16 steps. The bytes of a BF16 number are affine functions of the
// bits of an E4M3 code whose exponent is not 0: with exponent bits e3 e2 e1 e0, to which 120 is
// added, the high byte is sign, e3, not e3 four times, e2 e1, and the low byte e0, the mantissa and
// zeros. A step with any other code is looked up; weights have few such steps.
[[gnu::always_inline]] inline void widen_e4m3_step(const E4m3Table& table, __m512i codes,
                                                   __m512i* first, __m512i* second) {
  const __m512i exponent = _mm512_set1_epi8(0x78);
  if (__builtin_expect(_mm512_testn_epi8_mask(codes, exponent) != 0, 0))
    return widen_e4m3(table, codes, first, second);
  const __m512i low_bits = _mm512_set1_epi64(0x0000000001020408);
  const __m512i high_bits = _mm512_set1_epi64(0x1020404040404080);
  const __m512i low = _mm512_gf2p8affine_epi64_epi8(codes, low_bits, 0);
  const __m512i high = _mm512_gf2p8affine_epi64_epi8(codes, high_bits, 0x3c);
  *first = _mm512_unpacklo_epi8(low, high);
  *second = _mm512_unpackhi_epi8(low, high);
}

void gemm_by_tiles(const GemmArgs& a) {
  configure_tiles_for(a.m);
  Room<Bf16Product> room;
  const E4m3Table table;
  const int per_step = columns_of_step(a.w.type);
  const Order order = {.part = Bf16Product::kColumns,
                       .ahead = bytes_ahead(a.m, Bf16Product::kColumns / per_step * kStepBytes)};
  multiply(a, order, [&](const Block& b, int first, int m, Sum* sums) {
    if (a.w.type == WeightType::kBF16) {
      add_tiles(a, b, first, m, sums, room, StoredTiles(b, per_step, room));
    } else {
      add_tiles(
          a, b, first, m, sums, room,
          WidenedTiles(b, per_step, room, [&](int, int, __m512i step, __m512i* w0, __m512i* w1) {
            widen_e4m3_step(table, step, w0, w1);
          }));
    }
  });
  _tile_release();
}

// Flushes subnormal numbers to zero, as tile products do regardless of MXCSR.
__m512 flush(__m512 v) {
  const __m512 least = _mm512_set1_ps(0x1p-126f);
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(_mm512_abs_ps(v), least, _CMP_NLT_UQ), v);
}

// Forms sums of one row of x like TDPBF16PS according to Intel's manual, from +0: even and odd
// columns are summed separately with one rounding per product, then even + odd is added to the
// tile; subnormals are zero throughout. VDPBF16PS adds the odd product before the even one; with
// zero in place of either the other sum is unchanged, so the result is bit-identical to the tiles.
template <int N>
struct TileSums {
  __m512 even[N] = {}, odd[N] = {}, all[1][N] = {};

  void add(int panel, int pair, __m512i w) {
    const __m512i x = _mm512_set1_epi32(pair);
    const __m512i x_even = _mm512_and_si512(x, _mm512_set1_epi32(0xffff));
    const __m512i x_odd = _mm512_andnot_si512(_mm512_set1_epi32(0xffff), x);
    even[panel] = _mm512_dpbf16_ps(even[panel], (__m512bh)x_even, (__m512bh)w);
    odd[panel] = _mm512_dpbf16_ps(odd[panel], (__m512bh)x_odd, (__m512bh)w);
  }
  void end_tile() {
    for (int p = 0; p < N; ++p) {
      const __m512 tile = flush(_mm512_add_ps(even[p], odd[p]));
      all[0][p] = flush(_mm512_add_ps(all[0][p], tile));
      even[p] = odd[p] = _mm512_setzero_ps();
    }
  }
};

int load_pair(const char* x) {
  int pair;
  __builtin_memcpy(&pair, x, sizeof(pair));
  return pair;
}

template <int N>
void one_row_bf16(const char* const* x, const Block& b, int panel, Sum* sums) {
  TileSums<N> acc;
  const int n_steps = (b.n + 1) / 2;
  for (int first = 0; first < n_steps; first += kStepsMultiple) {
    for (int s = first; s < min(n_steps, first + kStepsMultiple); ++s)
      for (int p = 0; p < N; ++p) {
        _mm_prefetch(b.ahead[panel + p] + s * kStepBytes, _MM_HINT_T0);
        acc.add(p, load_pair(x[0] + s * 4), _mm512_load_si512(b.w[panel + p] + s * kStepBytes));
      }
    acc.end_tile();
  }
  add_sums<1, N>(acc.all, b, panel, 0, sums);
}

template <int N>
void one_row_e4m3(const char* const* x, const Block& b, int panel, Sum* sums) {
  const E4m3Table table;
  TileSums<N> acc;
  const int n_steps = (b.n + 3) / 4, per_tile = kStepsMultiple / 2;
  for (int first = 0; first < n_steps; first += per_tile) {
    for (int s = first; s < min(n_steps, first + per_tile); ++s)
      for (int p = 0; p < N; ++p) {
        _mm_prefetch(b.ahead[panel + p] + s * kStepBytes, _MM_HINT_T0);
        __m512i w0, w1;
        widen_e4m3_step(table, _mm512_load_si512(b.w[panel + p] + s * kStepBytes), &w0, &w1);
        acc.add(p, load_pair(x[0] + s * 8), w0);
        acc.add(p, load_pair(x[0] + s * 8 + 4), w1);
      }
    acc.end_tile();
  }
  add_sums<1, N>(acc.all, b, panel, 0, sums);
}

constexpr Tiles kOneRowBf16[1] = {{one_row_bf16<1>, one_row_bf16<kGroup>}};
constexpr Tiles kOneRowE4m3[1] = {{one_row_e4m3<1>, one_row_e4m3<kGroup>}};

// One row is read from memory a tenth faster by vectors.
void gemm_one_row(const GemmArgs& a) {
  const bool bf16_weights = a.w.type == WeightType::kBF16;
  multiply(a, {Bf16Product::kColumns}, [&](const Block& b, int first, int m, Sum* sums) {
    add_rows(a, bf16_weights ? kOneRowBf16 : kOneRowE4m3, b, sizeof(bf16), first, m, sums);
  });
}

void gemm(const GemmArgs& a) {
  if (a.x.type == ActivationType::kF32) return avx512_gemm(a);
  if (a.x.type == ActivationType::kU8) return amx_gemm_int8(a);
  a.m == 1 && !a.x.tiled ? gemm_one_row(a) : gemm_by_tiles(a);
}

void tile(const TileArgs& a) {
  const int element_bytes = a.x.type == ActivationType::kU8 ? 1 : sizeof(bf16);
  const int64_t n_bytes = encoded_columns(a.k) * element_bytes;
  for (int r = 0; r < a.n; ++r) {
    const char* const from = x_row(a.x, a.first + r);
    char* to = static_cast<char*>(a.to) + r * kStepBytes;
    for (int64_t i = 0; i < n_bytes; i += kStepBytes, to += a.n * kStepBytes)
      _mm512_store_si512(to, _mm512_loadu_si512(from + i));
  }
}

// Blocks of columns must begin where tiles do. INT4 with BF16 scales is multiplied by vectors.
bool takes_tiles(const Weight& w) {
  if (w.type == WeightType::kI4TwoLevel) return true;
  if (w.type != WeightType::kBF16 && w.type != WeightType::kF8E4M3 && w.type != WeightType::kI8)
    return false;
  constexpr int kMultiple = Bf16Product::kColumns;
  return !w.scales || (w.block_cols % kMultiple == 0 && w.col0 % kMultiple == 0);
}

}  // namespace

// The other AVX-512 kernels with BF16 stay installed.
void install_amx(KernelTable& t) {
  t.gemm = gemm;
  t.tile = tile;
  t.takes_tiles = takes_tiles;
}

}  // namespace tandem::cpu
