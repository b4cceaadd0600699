// Products of bytes: VPDPBUSD multiplies four columns of 16 rows at a time. A block of columns is
// summed in exact integers (255 * 128 * 512 < 2^24), then scaled and added as float.
#include "cpu_kernels/avx512/i4.h"
#include "cpu_kernels/avx512/one_row.h"
#include "cpu_kernels/avx512/panels.h"

namespace tandem::cpu {
namespace {

constexpr int kColumns = 512;        // summed in integers or widened together: 32 KiB per group
constexpr float kI4Unit = 1 / 16.f;  // widen_i4() without multipliers yields 16 times the codes
constexpr int kWideBytes = kColumns / 4 * kStepBytes;  // per panel

// Adds sums of four products of bytes to each lane.
Integers dot(Integers sum, __m512i x, __m512i w) {
  return (Integers)_mm512_dpbusd_epi32((__m512i)sum, x, w);
}

// Four columns of a row, broadcast to every lane.
__m512i four_columns(const char* x) {
  int columns;
  __builtin_memcpy(&columns, x, 4);
  return _mm512_set1_epi32(columns);
}

template <int M, int N, int kFetch>
void tile(const char* const* x, const Block& b, int panel, Sum* sums) {
  const int n_parts = b.n / b.part, n_steps = (b.part + 3) / 4;
  for (int part = 0, s = 0; part < n_parts; ++part) {
    Integers acc[M][N];
    clear(acc);
    for (const int end = s + n_steps; s < end; ++s) {
      fetch_ahead<N, kFetch>(b, panel, s);
      __m512i w[N];
#pragma GCC unroll 8
      for (int p = 0; p < N; ++p) w[p] = _mm512_load_si512(b.w[panel + p] + s * kStepBytes);
#pragma GCC unroll 8
      for (int i = 0; i < M; ++i) {
        const __m512i xs = four_columns(x[i] + s * 4);
#pragma GCC unroll 8
        for (int p = 0; p < N; ++p) acc[i][p] = dot(acc[i][p], xs, w[p]);
      }
    }
    add_sums<M, N>(acc, b, panel, part, sums);
  }
}

// Factors of 16 rows for a group of columns: multipliers of two levels, or BF16 scales.
__m512 read_factors(const int8_t* from) {
  return _mm512_cvtepi32_ps(
      _mm512_cvtepi8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(from))));
}
__m512 read_factors(const bf16* from) { return floats(from); }

// Loads what was loaded before, where GCC 12 would keep it on the stack: storing is slower.
__m512i load_again(const char* from) { return *reinterpret_cast<const volatile __m512i*>(from); }

// Widens INT4 in registers. The sums of a group of columns, exact integers, are multiplied by the
// rows' factors for this group in float: by its scales, or with two levels by integers. The
// latter's sums remain exact, 16 times integers below 2^24, until the rows' scales follow.
template <int M, int N, bool kTwoLevel>
void tile_i4(const char* const* x, const Block& b, int panel, Sum* sums) {
  constexpr int kStepColumns = 8, kColumnBytes = kStepBytes / kStepColumns;  // of a panel
  const FetchedLines<N> fetched(b, panel);
  const int64_t group = kTwoLevel ? b.group : b.part;
  const char* from[N];
  for (int p = 0; p < N; ++p) from[p] = b.w[panel + p];
  float* to = sums[0] + panel * kPanelRows;
  __asm__("" : "+r"(to));  // as in add_sums()
  __m512 totals[M][N];
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
    for (int p = 0; p < N; ++p)
      totals[i][p] = kTwoLevel ? __m512{} : _mm512_load_ps(to + i * kGroupRows + p * kPanelRows);
  for (int64_t c = 0, factors = 0; c < b.n; factors += kScalePanels * kPanelRows) {
    Integers acc[M][N];
    clear(acc);
    for (const int64_t end = c + group; c < end; c += kStepColumns) {
      const int64_t offset = c * kColumnBytes;
      fetched.fetch(offset);
      if constexpr (M <= kNearRows)
#pragma GCC unroll 4
        for (int p = 0; p < N; ++p) __builtin_prefetch(from[p] + offset + kNearBytes);
      __m512i w[N];
#pragma GCC unroll 8
      for (int p = 0; p < N; ++p) w[p] = first_of_i4(_mm512_load_si512(from[p] + offset));
#pragma GCC unroll 16
      for (int i = 0; i < M; ++i) {
        const __m512i xs = four_columns(x[i] + c);
#pragma GCC unroll 8
        for (int p = 0; p < N; ++p) acc[i][p] = dot(acc[i][p], xs, w[p]);
      }
#pragma GCC unroll 8
      for (int p = 0; p < N; ++p) w[p] = second_of_i4(load_again(from[p] + offset));
#pragma GCC unroll 16
      for (int i = 0; i < M; ++i) {
        const __m512i xs = four_columns(x[i] + c + 4);
#pragma GCC unroll 8
        for (int p = 0; p < N; ++p) acc[i][p] = dot(acc[i][p], xs, w[p]);
      }
    }
#pragma GCC unroll 8
    for (int p = 0; p < N; ++p) {
      const __m512 factor = kTwoLevel ? read_factors(b.multipliers[panel + p] + factors)
                                      : read_factors(b.stored[panel + p] + factors);
#pragma GCC unroll 16
      for (int i = 0; i < M; ++i)
        totals[i][p] = _mm512_fmadd_ps(floats(acc[i][p]), factor, totals[i][p]);
    }
  }
  const __m512 unit = _mm512_set1_ps(kI4Unit);
#pragma GCC unroll 8
  for (int p = 0; p < N; ++p) {
    const __m512 scale =
        kTwoLevel ? _mm512_mul_ps(_mm512_loadu_ps(b.scale[panel + p]), unit) : unit;
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) {
      float* const sum = to + i * kGroupRows + p * kPanelRows;
      _mm512_store_ps(sum, kTwoLevel ? _mm512_fmadd_ps(totals[i][p], scale, _mm512_load_ps(sum))
                                     : totals[i][p]);
    }
  }
}

template <int kFetch>
constexpr Tiles kTiles[] = {
    {tile<1, 1, kFetch>, tile<1, kGroup, kFetch>}, {tile<2, 1, kFetch>, tile<2, kGroup, kFetch>},
    {tile<3, 1, kFetch>, tile<3, kGroup, kFetch>}, {tile<4, 1, kFetch>, tile<4, kGroup, kFetch>},
    {tile<5, 1, kFetch>, tile<5, kGroup, kFetch>}, {tile<6, 1, kFetch>, tile<6, kGroup, kFetch>}};

constexpr int kMaxRows = sizeof(kTiles<0>) / sizeof(Tiles);

// Two sums for each row and panel leave registers for 6 rows of two panels.
constexpr int kI4Panels = 2;
template <int M, bool kTwoLevel>
void tile_i4_of_group(const char* const* x, const Block& b, int, Sum* sums) {
  for (int p = 0; p < kGroup; p += kI4Panels) tile_i4<M, kI4Panels, kTwoLevel>(x, b, p, sums);
}

template <int M, bool kTwoLevel>
constexpr Tiles kI4Pair = {tile_i4<M, 1, kTwoLevel>, tile_i4_of_group<M, kTwoLevel>};

template <bool kTwoLevel>
constexpr Tiles kI4Tiles[] = {kI4Pair<1, kTwoLevel>, kI4Pair<2, kTwoLevel>, kI4Pair<3, kTwoLevel>,
                              kI4Pair<4, kTwoLevel>, kI4Pair<5, kTwoLevel>, kI4Pair<6, kTwoLevel>};

constexpr int kMaxI4Rows = sizeof(kI4Tiles<true>) / sizeof(Tiles);

struct RowOfI8 : RowFormat {
  using Vector = Integers;
  static constexpr WeightType kType = WeightType::kI8;
  static constexpr ScalesOf kScales = ScalesOf::kRows;
  static constexpr int kColumns = cpu::kColumns, kXBytes = 4;

  [[gnu::always_inline]] void add(const char* x, const char* w, int64_t stride,
                                  Vector* sums) const {
    const __m512i xs = four_columns(x);
#pragma GCC unroll 4
    for (int p = 0; p < kGroup; ++p) sums[p] = dot(sums[p], xs, _mm512_load_si512(w + p * stride));
  }
};

template <ScalesOf kScalesOf>
struct RowOfI4 : RowFormat {
  using Vector = Integers;
  static constexpr WeightType kType = WeightType::kI4;
  static constexpr ScalesOf kScales = kScalesOf;
  static constexpr int kColumns = cpu::kColumns, kXBytes = 8;
  static constexpr float kUnit = kI4Unit;

  [[gnu::always_inline]] void add(const char* x, const char* w, int64_t stride,
                                  Vector* sums) const {
    const __m512i x0 = four_columns(x), x1 = four_columns(x + 4);
#pragma GCC unroll 4
    for (int p = 0; p < kGroup; ++p) {
      __m512i first, second;
      widen_i4(_mm512_load_si512(w + p * stride), &first, &second);
      sums[p] = dot(dot(sums[p], x0, first), x1, second);
    }
  }
};

void gemm_i8(const GemmArgs& a) {
  if (multiply_one_row<RowOfI8>(a)) return;
  const Order order = {.part = kColumns,
                       .ahead = a.m <= kMaxRows ? kNearAhead : kColumns / 2 * kStepBytes};
  multiply(a, order, [&a](Block& b, int first, int m, Sum* sums) {
    add_rows(a, kTiles<4>, kTiles<2>, kTiles<1>, kTiles<0>, b, 1, first, m, sums);
  });
}

// Widens a block with multipliers into `room`, kWideBytes per panel, where tiles read it as INT8.
void widen_block(Block& b, char* room) {
  const int group = b.group / 8;
  for (int p = 0; p < b.n_panels; ++p) {
    char* to = room + p * kWideBytes;
    const int8_t* multipliers = b.multipliers[p];
    for (int s = 0; s < b.n / 8; multipliers += kMultipliers) {
      const Multipliers m = multipliers_of(multipliers);
      for (const int end = s + group; s < end; ++s, to += 2 * kStepBytes) {
        __m512i first, second;
        widen_i4(_mm512_load_si512(b.w[p] + s * kStepBytes), m, &first, &second);
        _mm512_store_si512(to, first);
        _mm512_store_si512(to + kStepBytes, second);
      }
    }
    b.w[p] = room + p * kWideBytes;
  }
}

// Rows above which a block with two levels is widened once for all of them.
constexpr int kFewI4Rows = 40;

void add_widened_i4(const GemmArgs& a, Block& b, char* room, int first, int m, Sum* sums) {
  widen_block(b, room);
  add_tiles_of<kMaxRows>(a, b, 1, first, m, sums, (m + kMaxRows - 1) / kMaxRows,
                         [&](int tile, int rows) -> const Tiles& {
                           b.fetch = tile * 2;
                           return (b.fetch < kGroup ? kTiles<kTwoInTurns> : kTiles<0>)[rows - 1];
                         });
}

template <bool kTwoLevel>
void gemm_i4(const GemmArgs& a) {
  if (multiply_one_row<RowOfI4<kTwoLevel ? ScalesOf::kTwoLevels : ScalesOf::kGroups>>(a)) return;
  alignas(64) char room[kGroup * kWideBytes];
  const Order order = {
      .part = kColumns, .block = kColumns, .unit = kTwoLevel ? 1 : kI4Unit, .stored = !kTwoLevel};
  multiply(a, order, [&](Block& b, int first, int m, Sum* sums) {
    if (kTwoLevel && m > kFewI4Rows) return add_widened_i4(a, b, room, first, m, sums);
    add_rows_sharing<kMaxI4Rows>(a, b, 1, first, m, sums, [](int rows) -> const Tiles& {
      return kI4Tiles<kTwoLevel>[rows - 1];
    });
  });
}

// The first n of 16 floats, padded with zeros.
__m512 load_floats(const float* from, int n) {
  const int left = n < 0 ? 0 : min(n, 16);
  return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << left) - 1), from);
}

}  // namespace

void avx512_gemm_int8(const GemmArgs& a) {
  a.w.type == WeightType::kI8           ? gemm_i8(a)
  : a.w.type == WeightType::kI4TwoLevel ? gemm_i4<true>(a)
                                        : gemm_i4<false>(a);
}

void avx512_encode_u8(const EncodeArgs& a) {
  __m512 max = _mm512_setzero_ps();
  for (int c = 0; c < a.k; c += 16)
    max = _mm512_max_ps(max, _mm512_abs_ps(load_floats(a.from + c, a.k - c)));
  *a.scale = _mm512_reduce_max_ps(max) / 127;
  const __m512 inverse = _mm512_set1_ps(*a.scale > 0 ? 1 / *a.scale : 0);
  char* to = static_cast<char*>(a.to);
  for (int c = 0; c < encoded_columns(a.k); c += 16) {
    const __m512 x = _mm512_mul_ps(load_floats(a.from + c, a.k - c), inverse);
    const __m512i code = _mm512_add_epi32(_mm512_cvtps_epi32(x), _mm512_set1_epi32(128));
    _mm_store_si128(reinterpret_cast<__m128i*>(to + c), _mm512_cvtepi32_epi8(code));
  }
}

void install_avx512_int8(KernelTable& t) {
  t.activation[static_cast<int>(WeightType::kI8)] = ActivationType::kU8;
  t.activation[static_cast<int>(WeightType::kI4)] = ActivationType::kU8;
  t.activation[static_cast<int>(WeightType::kI4TwoLevel)] = ActivationType::kU8;
  t.encode = avx512_encode_u8;
}

}  // namespace tandem::cpu
