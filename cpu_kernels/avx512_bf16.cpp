// Products of BF16 activations with BF16 and FP8 weights: VDPBF16PS multiplies two columns of 16
// rows at a time. FP8 is widened, exactly, block by block in the level-1 cache.
#include "cpu_kernels/avx512_bf16.h"

#include "cpu_kernels/avx512_e4m3.h"
#include "cpu_kernels/avx512_panels.h"

namespace tandem::cpu {

void avx512_gemm(const GemmArgs&);
void avx512_encode_u8(const EncodeArgs&);

namespace {

constexpr int kColumns = 256;                              // summed together where no scale changes
constexpr int kWideColumns = 128;                          // of FP8: 16 KiB of BF16 in a group
constexpr int kWideBytes = kWideColumns / 2 * kStepBytes;  // of one panel

template <int M, int N, bool kFirst>
void tile(const char* const* x, const Block& b, int panel, Sum* sums) {
  __m512 acc[M][N];
  clear(acc);
  add_products<M, N, 4, kFirst>(x, b.w + panel, (b.n + 1) / 2, acc, b.ahead + panel);
  add_sums<M, N>(acc, b, panel, sums);
}

// Widens in registers and, if asked to, leaves the BF16 steps in the room for them: the products
// hide the cost of widening.
template <int M, int N, bool kKeep>
void tile_e4m3(const char* const* x, const Block& b, int panel, Sum* sums) {
  const E4m3Table table;
  __m512 acc[M][N];
  clear(acc);
  const int n_steps = (b.n + 3) / 4;
  for (int s = 0; s < n_steps; ++s) {
    __m512bh xs[M][2];
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) {
      int pairs[2];
      __builtin_memcpy(pairs, x[i] + s * 8, 8);
#pragma GCC unroll 8
      for (int h = 0; h < 2; ++h) xs[i][h] = (__m512bh)_mm512_set1_epi32(pairs[h]);
    }
#pragma GCC unroll 8
    for (int p = 0; p < N; ++p) {
      const char* from = b.w[panel + p] + s * kStepBytes;
      _mm_prefetch(b.ahead[panel + p] + s * kStepBytes, _MM_HINT_T0);
      __m512i first, second;
      widen_e4m3(table, _mm512_load_si512(from), &first, &second);
      if constexpr (kKeep) {
        char* to = b.wide + (panel + p) * kWideBytes + s * 2 * kStepBytes;
        _mm512_store_si512(to, first);
        _mm512_store_si512(to + kStepBytes, second);
      }
#pragma GCC unroll 8
      for (int i = 0; i < M; ++i) {
        acc[i][p] = _mm512_dpbf16_ps(acc[i][p], xs[i][0], (__m512bh)first);
        acc[i][p] = _mm512_dpbf16_ps(acc[i][p], xs[i][1], (__m512bh)second);
      }
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

// Many rows leave registers for two panels only.
template <int M>
void tile_e4m3_halves(const char* const* x, const Block& b, int, Sum* sums) {
  tile_e4m3<M, kGroup / 2, false>(x, b, 0, sums);
  tile_e4m3<M, kGroup / 2, false>(x, b, kGroup / 2, sums);
}

constexpr Tiles kFewE4m3[] = {{tile_e4m3<1, 1, false>, tile_e4m3<1, kGroup, false>},
                              {tile_e4m3<2, 1, false>, tile_e4m3<2, kGroup, false>},
                              {tile_e4m3<3, 1, false>, tile_e4m3<3, kGroup, false>},
                              {tile_e4m3<4, 1, false>, tile_e4m3<4, kGroup, false>},
                              {tile_e4m3<5, 1, false>, tile_e4m3_halves<5>},
                              {tile_e4m3<6, 1, false>, tile_e4m3_halves<6>}};
constexpr Tiles kWideningE4m3[] = {{tile_e4m3<1, 1, true>, tile_e4m3<1, kGroup, true>},
                                   {tile_e4m3<2, 1, true>, tile_e4m3<2, kGroup, true>},
                                   {tile_e4m3<3, 1, true>, tile_e4m3<3, kGroup, true>},
                                   {tile_e4m3<4, 1, true>, tile_e4m3<4, kGroup, true>}};

void gemm_bf16(const GemmArgs& a) {
  multiply(a, kColumns, [&a](const Block& b, int first, int m, Sum* sums) {
    add_rows(a, kTiles<true>, kTiles<false>, b, sizeof(bf16), first, m, sums);
  });
}

void gemm_e4m3(const GemmArgs& a) {
  alignas(64) char room[kGroup * kWideBytes];
  multiply(a, kWideColumns, [&](Block& b, int first, int m, Sum* sums) {
    add_widened_rows(a, kFewE4m3, kWideningE4m3, kTiles<false>, b, room, kWideBytes, sizeof(bf16),
                     first, m, sums);
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
