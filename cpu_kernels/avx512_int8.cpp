// Products of bytes: VPDPBUSD multiplies four columns of 16 rows at a time. A block of columns is
// summed in exact integers (255 * 128 * 512 < 2^24), then scaled and added as float.
#include "cpu_kernels/avx512_i4.h"
#include "cpu_kernels/avx512_one_row.h"
#include "cpu_kernels/avx512_panels.h"

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

// Widens in registers and, if kKeep, stores the INT8 steps in b.wide. The products hide the cost of
// widening. With two-level scales a part spans several groups.
template <int M, int N, bool kKeep, bool kTwoLevel>
void tile_i4(const char* const* x, const Block& b, int panel, Sum* sums) {
  const int n_parts = b.n / b.part, group = (kTwoLevel ? b.group : b.part) / 8;
  for (int part = 0, s = 0, g = 0; part < n_parts; ++part) {
    Integers acc[M][N];
    clear(acc);
    for (const int end = s + b.part / 8; s < end; ++g) {
      Multipliers m[N];
      if constexpr (kTwoLevel)
#pragma GCC unroll 8
        for (int p = 0; p < N; ++p)
          m[p] = multipliers_of(b.multipliers[panel + p] + g * kMultipliers);
      for (const int end_of_group = s + group; s < end_of_group; ++s) {
        fetch_stored<N, kKeep>(b, panel, s);
        __m512i first[N], second[N];
#pragma GCC unroll 8
        for (int p = 0; p < N; ++p) {
          const __m512i step = _mm512_load_si512(b.w[panel + p] + s * kStepBytes);
          if constexpr (kTwoLevel) {
            widen_i4(step, m[p], &first[p], &second[p]);
          } else {
            widen_i4(step, &first[p], &second[p]);
          }
          if constexpr (kKeep) {
            char* to = b.wide + (panel + p) * kWideBytes + s * 2 * kStepBytes;
            _mm512_store_si512(to, first[p]);
            _mm512_store_si512(to + kStepBytes, second[p]);
          }
        }
#pragma GCC unroll 16
        for (int i = 0; i < M; ++i) {
          const __m512i x0 = four_columns(x[i] + s * 8), x1 = four_columns(x[i] + s * 8 + 4);
#pragma GCC unroll 8
          for (int p = 0; p < N; ++p) acc[i][p] = dot(acc[i][p], x0, first[p]);
#pragma GCC unroll 8
          for (int p = 0; p < N; ++p) acc[i][p] = dot(acc[i][p], x1, second[p]);
        }
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
constexpr int kGroupMax = 3;
template <int M, bool kKeep, bool kTwoLevel>
void tile_i4_of_group(const char* const* x, const Block& b, int, Sum* sums) {
  constexpr int N = M <= kGroupMax ? kGroup : kGroup / 2;
  for (int p = 0; p < kGroup; p += N) tile_i4<M, N, kKeep, kTwoLevel>(x, b, p, sums);
}

template <int M, bool kKeep, bool kTwoLevel>
constexpr Tiles kI4Pair = {tile_i4<M, 1, kKeep, kTwoLevel>, tile_i4_of_group<M, kKeep, kTwoLevel>};

template <bool kTwoLevel>
constexpr Tiles kFewI4[] = {kI4Pair<1, false, kTwoLevel>, kI4Pair<2, false, kTwoLevel>,
                            kI4Pair<3, false, kTwoLevel>, kI4Pair<4, false, kTwoLevel>,
                            kI4Pair<5, false, kTwoLevel>, kI4Pair<6, false, kTwoLevel>,
                            kI4Pair<7, false, kTwoLevel>, kI4Pair<8, false, kTwoLevel>,
                            kI4Pair<9, false, kTwoLevel>, kI4Pair<10, false, kTwoLevel>};
constexpr int kWidening = 8;  // rows

struct RowOfI8 {
  using Vector = Integers;
  static constexpr WeightType kType = WeightType::kI8;
  static constexpr ScalesOf kScales = ScalesOf::kRows;
  static constexpr int kColumns = cpu::kColumns, kXBytes = 4, kAhead = kAheadOfFew;
  static constexpr float kUnit = 1;
  static constexpr bool kAlways = false;

  [[gnu::always_inline]] void add(const char* x, const char* w, int64_t stride,
                                  Vector* sums) const {
    const __m512i xs = four_columns(x);
#pragma GCC unroll 4
    for (int p = 0; p < kGroup; ++p) sums[p] = dot(sums[p], xs, _mm512_load_si512(w + p * stride));
  }
};

template <ScalesOf kScalesOf>
struct RowOfI4 {
  using Vector = Integers;
  static constexpr WeightType kType = WeightType::kI4;
  static constexpr ScalesOf kScales = kScalesOf;
  static constexpr int kColumns = cpu::kColumns, kXBytes = 8, kAhead = 4096;
  static constexpr float kUnit = kI4Unit;
  static constexpr bool kAlways = true;

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
                       .ahead = a.m <= kMaxRows ? kAheadOfFew : kColumns / 2 * kStepBytes};
  multiply(a, order, [&a](Block& b, int first, int m, Sum* sums) {
    add_rows(a, kTiles<4>, kTiles<2>, kTiles<1>, kTiles<0>, b, 1, first, m, sums);
  });
}

template <bool kTwoLevel>
void gemm_i4(const GemmArgs& a) {
  if (multiply_one_row<RowOfI4<kTwoLevel ? ScalesOf::kTwoLevels : ScalesOf::kGroups>>(a)) return;
  alignas(64) char room[kGroup * kWideBytes];
  const Order order = {.part = kColumns,
                       .block = kColumns,
                       .ahead = a.m <= kGroupMax ? kAheadOfFew : kAheadOfMany,
                       .unit = kTwoLevel ? 1 : kI4Unit};
  multiply(a, order, [&](Block& b, int first, int m, Sum* sums) {
    add_widened_rows<kWidening>(a, kFewI4<kTwoLevel>, kI4Pair<kWidening, true, kTwoLevel>,
                                kTiles<kTwoInTurns>, kTiles<0>, b, room, kWideBytes, 1, first, m,
                                sums);
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
