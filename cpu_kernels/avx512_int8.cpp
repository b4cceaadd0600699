// Products of bytes: VPDPBUSD multiplies four columns of 16 rows at a time. A block of columns is
// summed in integers, exactly (255 * 128 * 256 < 2^24), then scaled and added as float.
#include "cpu_kernels/avx512_i4.h"
#include "cpu_kernels/avx512_panels.h"

namespace tandem::cpu {
namespace {

constexpr int kColumns = 256;
constexpr int kWideBytes = kColumns / 4 * kStepBytes;  // of one panel

// A sum of four products of bytes is added to each lane.
Integers dot(Integers sum, __m512i x, __m512i w) {
  return (Integers)_mm512_dpbusd_epi32((__m512i)sum, x, w);
}

// Four columns of a row in every lane.
__m512i four_columns(const char* x) {
  int columns;
  __builtin_memcpy(&columns, x, 4);
  return _mm512_set1_epi32(columns);
}

template <int M, int N, bool kFirst>
void tile(const char* const* x, const Block& b, int panel, Sum* sums) {
  Integers acc[M][N];
  clear(acc);
  const int n_steps = (b.n + 3) / 4;
  for (int s = 0; s < n_steps; ++s) {
    __m512i w[N];
#pragma GCC unroll 8
    for (int p = 0; p < N; ++p) {
      const char* from = b.w[panel + p] + s * kStepBytes;
      if (kFirst) _mm_prefetch(b.ahead[panel + p] + s * kStepBytes, _MM_HINT_T0);
      w[p] = _mm512_load_si512(from);
    }
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) {
      const __m512i xs = four_columns(x[i] + s * 4);
#pragma GCC unroll 8
      for (int p = 0; p < N; ++p) acc[i][p] = dot(acc[i][p], xs, w[p]);
    }
  }
  add_sums<M, N>(acc, b, panel, sums);
}

template <int M, int N, bool kKeep>
void tile_i4(const char* const* x, const Block& b, int panel, Sum* sums) {
  Integers acc[M][N];
  clear(acc);
  const int n_steps = b.n / 8;
  for (int s = 0; s < n_steps; ++s)
#pragma GCC unroll 8
    for (int p = 0; p < N; ++p) {
      const char* from = b.w[panel + p] + s * kStepBytes;
      _mm_prefetch(b.ahead[panel + p] + s * kStepBytes, _MM_HINT_T0);
      __m512i first, second;
      widen_i4(_mm512_load_si512(from), &first, &second);
      if constexpr (kKeep) {
        char* to = b.wide + (panel + p) * kWideBytes + s * 2 * kStepBytes;
        _mm512_store_si512(to, first);
        _mm512_store_si512(to + kStepBytes, second);
      }
#pragma GCC unroll 8
      for (int i = 0; i < M; ++i) {
        acc[i][p] = dot(acc[i][p], four_columns(x[i] + s * 8), first);
        acc[i][p] = dot(acc[i][p], four_columns(x[i] + s * 8 + 4), second);
      }
    }
  add_sums<M, N>(acc, b, panel, sums);
}

// kFirst: of the rows that read a block first, and so fetch what comes after it.
template <bool kFirst>
constexpr Tiles kTiles[] = {
    {tile<1, 1, kFirst>, tile<1, kGroup, kFirst>}, {tile<2, 1, kFirst>, tile<2, kGroup, kFirst>},
    {tile<3, 1, kFirst>, tile<3, kGroup, kFirst>}, {tile<4, 1, kFirst>, tile<4, kGroup, kFirst>},
    {tile<5, 1, kFirst>, tile<5, kGroup, kFirst>}, {tile<6, 1, kFirst>, tile<6, kGroup, kFirst>}};

template <bool kKeep>
constexpr Tiles kI4Tiles[] = {{tile_i4<1, 1, kKeep>, tile_i4<1, kGroup, kKeep>},
                              {tile_i4<2, 1, kKeep>, tile_i4<2, kGroup, kKeep>},
                              {tile_i4<3, 1, kKeep>, tile_i4<3, kGroup, kKeep>},
                              {tile_i4<4, 1, kKeep>, tile_i4<4, kGroup, kKeep>}};

void gemm_i8(const GemmArgs& a) {
  multiply(a, kColumns, [&a](const Block& b, int first, int m, Sum* sums) {
    add_rows(a, kTiles<true>, kTiles<false>, b, 1, first, m, sums);
  });
}

void gemm_i4(const GemmArgs& a) {
  alignas(64) char room[kGroup * kWideBytes];
  multiply(a, kColumns, [&](Block& b, int first, int m, Sum* sums) {
    multiply_scales(b, 1 / 16.f);
    add_widened_rows(a, kI4Tiles<false>, kI4Tiles<true>, kTiles<false>, b, room, kWideBytes, 1,
                     first, m, sums);
  });
}

// The first n of 16 floats, zeros after them.
__m512 load_floats(const float* from, int n) {
  const int left = n < 0 ? 0 : min(n, 16);
  return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << left) - 1), from);
}

}  // namespace

void avx512_gemm_int8(const GemmArgs& a) { a.w.type == WeightType::kI8 ? gemm_i8(a) : gemm_i4(a); }

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
  t.encode = avx512_encode_u8;
}

}  // namespace tandem::cpu
