// Products of BF16 activations with BF16 and FP8 weights: VDPBF16PS multiplies two columns of 16
// rows at a time. FP8 is widened exactly, block by block, in the level-1 cache.
#include "cpu_kernels/avx512/e4m3.h"
#include "cpu_kernels/avx512/one_row.h"
#include "cpu_kernels/avx512/panels.h"

namespace tandem::cpu {

void avx512_gemm(const GemmArgs&);
void avx512_encode_u8(const EncodeArgs&);

namespace {

constexpr int kColumns = 256;       // summed together where no scale changes: 32 KiB per group
constexpr int kScaleColumns = 128;  // FP8 columns summed together
constexpr int kWideColumns = 256;   // FP8 columns of a tile, widened: 32 KiB per group
constexpr int kWideBytes = kWideColumns / 2 * kStepBytes;  // per panel
constexpr int kBlockBytes = kColumns / 2 * kStepBytes;     // BF16, per panel

// Two columns of a row, broadcast to every lane.
__m512bh two_columns(const char* x) {
  int columns;
  __builtin_memcpy(&columns, x, 4);
  return (__m512bh)_mm512_set1_epi32(columns);
}

template <int M, int N, int kFetch>
void tile(const char* const* x, const Block& b, int panel, Sum* sums) {
  const int n_parts = b.n / b.part, n_steps = (b.part + 1) / 2;
  for (int part = 0, s = 0; part < n_parts; ++part) {
    __m512 acc[M][N];
    clear(acc);
    for (const int end = s + n_steps; s < end; ++s) {
      fetch_ahead<N, kFetch>(b, panel, s);
      __m512bh w[N];
#pragma GCC unroll 8
      for (int p = 0; p < N; ++p)
        w[p] = (__m512bh)_mm512_load_si512(b.w[panel + p] + s * kStepBytes);
#pragma GCC unroll 8
      for (int i = 0; i < M; ++i) {
        const __m512bh xs = two_columns(x[i] + s * 4);
#pragma GCC unroll 8
        for (int p = 0; p < N; ++p) acc[i][p] = _mm512_dpbf16_ps(acc[i][p], xs, w[p]);
      }
    }
    add_sums<M, N>(acc, b, panel, part, sums);
  }
}

// Widens in registers and, if kKeep, stores the BF16 steps in b.wide. The products hide the cost of
// widening.
template <int M, int N, bool kKeep>
void tile_e4m3(const char* const* x, const Block& b, int panel, Sum* sums) {
  const E4m3Table table;
  const int n_parts = b.n / b.part, n_steps = (b.part + 3) / 4;
  for (int part = 0, s = 0; part < n_parts; ++part) {
    __m512 acc[M][N];
    clear(acc);
    for (const int end = s + n_steps; s < end; ++s) {
      fetch_stored<N, kKeep>(b, panel, s);
      __m512i first[N], second[N];
#pragma GCC unroll 8
      for (int p = 0; p < N; ++p) {
        const char* from = b.w[panel + p] + s * kStepBytes;
        widen_e4m3(table, _mm512_load_si512(from), &first[p], &second[p]);
        if constexpr (kKeep) {
          char* to = b.wide + (panel + p) * kWideBytes + s * 2 * kStepBytes;
          _mm512_store_si512(to, first[p]);
          _mm512_store_si512(to + kStepBytes, second[p]);
        }
      }
#pragma GCC unroll 16
      for (int i = 0; i < M; ++i) {
        const __m512bh x0 = two_columns(x[i] + s * 8), x1 = two_columns(x[i] + s * 8 + 4);
#pragma GCC unroll 8
        for (int p = 0; p < N; ++p) acc[i][p] = _mm512_dpbf16_ps(acc[i][p], x0, (__m512bh)first[p]);
#pragma GCC unroll 8
        for (int p = 0; p < N; ++p)
          acc[i][p] = _mm512_dpbf16_ps(acc[i][p], x1, (__m512bh)second[p]);
      }
    }
    add_sums<M, N>(acc, b, panel, part, sums);
  }
}

template <int kFetch>
constexpr Tiles kTiles[] = {
    {tile<1, 1, kFetch>, tile<1, kGroup, kFetch>}, {tile<2, 1, kFetch>, tile<2, kGroup, kFetch>},
    {tile<3, 1, kFetch>, tile<3, kGroup, kFetch>}, {tile<4, 1, kFetch>, tile<4, kGroup, kFetch>},
    {tile<5, 1, kFetch>, tile<5, kGroup, kFetch>}, {tile<6, 1, kFetch>, tile<6, kGroup, kFetch>}};

constexpr int kMaxRows = sizeof(kTiles<0>) / sizeof(Tiles);

// More rows leave registers for two panels only.
constexpr int kGroupMax = 4;
template <int M, bool kKeep>
void tile_e4m3_of_group(const char* const* x, const Block& b, int, Sum* sums) {
  constexpr int N = M <= kGroupMax ? kGroup : kGroup / 2;
  for (int p = 0; p < kGroup; p += N) tile_e4m3<M, N, kKeep>(x, b, p, sums);
}

template <int M, bool kKeep>
constexpr Tiles kE4m3Pair = {tile_e4m3<M, 1, kKeep>, tile_e4m3_of_group<M, kKeep>};

constexpr Tiles kFewE4m3[] = {kE4m3Pair<1, false>, kE4m3Pair<2, false>, kE4m3Pair<3, false>,
                              kE4m3Pair<4, false>, kE4m3Pair<5, false>, kE4m3Pair<6, false>,
                              kE4m3Pair<7, false>, kE4m3Pair<8, false>, kE4m3Pair<9, false>,
                              kE4m3Pair<10, false>};
constexpr int kWidening = 8;  // rows

struct RowOfBf16 : RowFormat {
  using Vector = __m512;
  static constexpr WeightType kType = WeightType::kBF16;
  static constexpr ScalesOf kScales = ScalesOf::kNothing;
  static constexpr int kColumns = cpu::kColumns, kXBytes = 4;

  [[gnu::always_inline]] void add(const char* x, const char* w, int64_t stride,
                                  Vector* sums) const {
    const __m512bh xs = two_columns(x);
#pragma GCC unroll 4
    for (int p = 0; p < kGroup; ++p)
      sums[p] = _mm512_dpbf16_ps(sums[p], xs, (__m512bh)_mm512_load_si512(w + p * stride));
  }
};

struct RowOfE4m3 : RowFormat {
  using Vector = __m512;
  static constexpr WeightType kType = WeightType::kF8E4M3;
  static constexpr ScalesOf kScales = ScalesOf::kPanels;
  static constexpr int kColumns = kScaleColumns, kXBytes = 8;
  E4m3Table table;

  [[gnu::always_inline]] void add(const char* x, const char* w, int64_t stride,
                                  Vector* sums) const {
    const __m512bh x0 = two_columns(x), x1 = two_columns(x + 4);
#pragma GCC unroll 4
    for (int p = 0; p < kGroup; ++p) {
      __m512i first, second;
      widen_e4m3(table, _mm512_load_si512(w + p * stride), &first, &second);
      sums[p] = _mm512_dpbf16_ps(sums[p], x0, (__m512bh)first);
      sums[p] = _mm512_dpbf16_ps(sums[p], x1, (__m512bh)second);
    }
  }
};

void gemm_bf16(const GemmArgs& a) {
  if (multiply_one_row<RowOfBf16>(a)) return;
  const Order order = {.part = kColumns, .ahead = a.m <= kMaxRows ? kNearAhead : 2 * kBlockBytes};
  multiply(a, order, [&a](Block& b, int first, int m, Sum* sums) {
    add_rows(a, kTiles<4>, kTiles<2>, kTiles<1>, kTiles<0>, b, sizeof(bf16), first, m, sums);
  });
}

void gemm_e4m3(const GemmArgs& a) {
  if (multiply_one_row<RowOfE4m3>(a)) return;
  alignas(64) char room[kGroup * kWideBytes];
  const Order order = {.part = kScaleColumns,
                       .block = kWideColumns,
                       .ahead = a.m <= kGroupMax ? kAheadOfFew : kAheadOfMany};
  multiply(a, order, [&](Block& b, int first, int m, Sum* sums) {
    add_widened_rows<kWidening>(a, kFewE4m3, kE4m3Pair<kWidening, true>, kTiles<kTwoInTurns>,
                                kTiles<0>, b, room, kWideBytes, sizeof(bf16), first, m, sums);
  });
}

void gemm(const GemmArgs& a) {
  if (a.x.type != ActivationType::kBF16) return avx512_gemm(a);
  a.w.type == WeightType::kF8E4M3 ? gemm_e4m3(a) : gemm_bf16(a);
}

void encode(const EncodeArgs& a) {
  if (a.type == ActivationType::kU8) return avx512_encode_u8(a);
  bf16* to = static_cast<bf16*>(a.to);
  for (int c = 0; c < a.k; c += 32) {
    const int left = min(32, a.k - c);
    const __mmask32 mask = left == 32 ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
    const __m512 low = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), a.from + c);
    const __m512 high = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), a.from + c + 16);
    _mm512_store_si512(to + c, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
  const int written = (a.k + 31) / 32 * 32;
  __builtin_memset(to + written, 0, (encoded_columns(a.k) - written) * sizeof(bf16));
}

}  // namespace

void install_avx512_bf16(KernelTable& t) {
  t.activation[static_cast<int>(WeightType::kBF16)] = ActivationType::kBF16;
  t.activation[static_cast<int>(WeightType::kF8E4M3)] = ActivationType::kBF16;
  t.encode = encode;
  t.gemm = gemm;
}

}  // namespace tandem::cpu
