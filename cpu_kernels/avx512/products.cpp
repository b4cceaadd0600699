// Packing for AVX-512, and its products of float activations. Blocks of weights are widened to
// float in the level-1 cache and used for all rows of x.
#include "cpu_kernels/avx512/e4m3.h"
#include "cpu_kernels/avx512/panels.h"
#include "cpu_kernels/avx512/transpose.h"

namespace tandem::cpu {
namespace {

constexpr int kColumns = 64;  // widened together: 16 KiB of float per group

// Reorders the words in each 16 bytes of an FP8 step.
__m512i exchange_words(__m512i step) {
  const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  return _mm512_shuffle_epi8(step, _mm512_broadcast_i32x4(order));
}

// Loops have constant length so that steps stay in registers: a store to the stack between
// streaming stores flushes their half-filled line, which makes packing five times slower.
void pack(const PackArgs& a) {
  const int64_t row_size = row_bytes(a.type, a.cols);
  const int64_t stride = panel_bytes(a.type, a.cols);
  for (int64_t r = 0; r < a.n_rows; r += kPanelRows) {
    char* to = static_cast<char*>(a.to) + (a.first_row + r) / kPanelRows * stride;
    const int n_rows = min(kPanelRows, static_cast<int>(a.n_rows - r));
    for (int64_t b = 0; b < stride / kPanelRows; b += kStepBytes) {
      const int64_t left = row_size - b;
      const __mmask64 mask = left >= 64 ? ~__mmask64{0} : (__mmask64{1} << left) - 1;
      __m512i steps[16];
      for (int i = 0; i < 16; ++i)
        steps[i] =
            _mm512_maskz_loadu_epi8(i < n_rows ? mask : 0, bytes(a.from) + (r + i) * row_size + b);
      transpose(steps);
      if (a.type == WeightType::kF8E4M3)
        for (int i = 0; i < 16; ++i) steps[i] = exchange_words(steps[i]);
      for (int i = 0; i < 16; ++i)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + b * kPanelRows + i * kStepBytes),
                            steps[i]);
    }
  }
  _mm_sfence();
}

using Floats = __m512[kColumns];  // per panel

void widen_bf16(__m512i step, __m512* to) {
  to[0] = _mm512_castsi512_ps(_mm512_slli_epi32(step, 16));
  to[1] = _mm512_castsi512_ps(_mm512_and_si512(step, _mm512_set1_epi32(-65536)));
}

void widen_f16(__m512i step, __m512* to) {
  to[0] = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(step));
  to[1] = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(step, 16)));
}

// Widens whole steps that hold n columns, without scales.
void widen_panel(WeightType type, const char* from, int n, __m512* to) {
  const int per_step = columns_of_step(type);
  const E4m3Table e4m3;
  for (int c = 0; c < n; c += per_step, from += kStepBytes) {
    const __m512i step = _mm512_load_si512(from);
    switch (type) {
      case WeightType::kF32:
        to[c] = _mm512_castsi512_ps(step);
        break;
      case WeightType::kF16:
        widen_f16(step, to + c);
        break;
      case WeightType::kBF16:
        widen_bf16(step, to + c);
        break;
      case WeightType::kF8E4M3: {
        __m512i first, second;
        widen_e4m3(e4m3, step, &first, &second);
        widen_bf16(first, to + c);
        widen_bf16(second, to + c + 2);
        break;
      }
      case WeightType::kI8:
      case WeightType::kI4:
      case WeightType::kI4TwoLevel:
        break;  // for byte products only
    }
  }
}

template <int M, int N>
void tile(const char* const* x, const Block& b, int panel, Sum* sums) {
  __m512 acc[M][N] = {};
  for (int c = 0; c < b.n; ++c)
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) {
      const __m512 xs = _mm512_set1_ps(reinterpret_cast<const float*>(x[i])[c]);
#pragma GCC unroll 8
      for (int p = 0; p < N; ++p)
        acc[i][p] = _mm512_fmadd_ps(xs, _mm512_load_ps(b.w[panel + p] + c * kStepBytes), acc[i][p]);
    }
  add_sums<M, N>(acc, b, panel, 0, sums);
}

constexpr Tiles kTiles[] = {{tile<1, 1>, tile<1, kGroup>}, {tile<2, 1>, tile<2, kGroup>},
                            {tile<3, 1>, tile<3, kGroup>}, {tile<4, 1>, tile<4, kGroup>},
                            {tile<5, 1>, tile<5, kGroup>}, {tile<6, 1>, tile<6, kGroup>}};

}  // namespace

void avx512_gemm_int8(const GemmArgs&);

void avx512_gemm(const GemmArgs& a) {
  if (a.x.type == ActivationType::kU8) return avx512_gemm_int8(a);
  Floats wide[kGroup];
  multiply(a, {kColumns}, [&](Block b, int first, int m, Sum* sums) {
    if (a.w.type != WeightType::kF32) {
      for (int p = 0; p < b.n_panels; ++p) {
        widen_panel(a.w.type, b.w[p], b.n, wide[p]);
        b.w[p] = reinterpret_cast<const char*>(wide[p]);
      }
    }
    add_rows(a, kTiles, b, sizeof(float), first, m, sums);
  });
}

namespace {

// The sum over the lanes of each of 16 vectors.
__m512 sum_lanes(const __m512 (&v)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; ++i) t[i] = _mm512_castps_si512(v[i]);
  transpose(t);
  __m512 s[16];
  for (int i = 0; i < 16; ++i) s[i] = _mm512_castsi512_ps(t[i]);
  for (int n = 8; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) s[i] = _mm512_add_ps(s[i], s[i + n]);
  return s[0];
}

// x for 16 rows of w that begin at output row j; 0 for rows not requested.
__m512 x_of_panel(const float* x, int j, int n) {
  const int begin = j < 0 ? -j : 0, end = min(kPanelRows, n - j);
  return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << end) - (1u << begin)), x + j);
}

// Takes 16 columns of some panels at a time, widened once for all rows of x. Lanes are rows of w,
// so lanes are summed at the end.
void gemm_transposed(const GemmArgs& a) {
  constexpr int kPanels = 16;
  const PanelRange range = panels_of(a);
  const int per_step = columns_of_step(a.w.type);
  __m512 w[kPanels][16] = {};
  alignas(64) float scales[kPanels][kPanelRows];
  ScaleColumns columns(a.w);
  for (int col = 0, n; col < a.k; col += n) {
    n = columns.take(min(16, a.k - col));
    const auto wanted = static_cast<__mmask16>((1u << n) - 1);
    for (int first = 0; first < range.n; first += kPanels) {
      const int n_panels = min(kPanels, range.n - first);
      for (int p = 0; p < n_panels; ++p) {
        const int64_t at = range.first + first + p;
        widen_panel(a.w.type, bytes(a.w.data) + at * a.w.stride + col / per_step * kStepBytes, n,
                    w[p]);
        PanelScales(a.w, at).read(columns.block(), scales[p]);
      }
      for (int i = 0; i < a.m; ++i) {
        const float* x = reinterpret_cast<const float*>(x_row(a.x, i));
        __m512 acc[16] = {};
        for (int p = 0; p < n_panels; ++p) {
          const __m512 xs = _mm512_mul_ps(x_of_panel(x, (first + p) * kPanelRows - range.skip, a.n),
                                          _mm512_load_ps(scales[p]));
#pragma GCC unroll 16
          for (int c = 0; c < 16; ++c) acc[c] = _mm512_fmadd_ps(xs, w[p][c], acc[c]);
        }
        float* const out = a.out + i * a.out_stride + col;
        const __m512 before = first == 0 ? __m512{} : _mm512_maskz_loadu_ps(wanted, out);
        _mm512_mask_storeu_ps(out, wanted, _mm512_add_ps(before, sum_lanes(acc)));
      }
    }
  }
}

}  // namespace

void install_avx512_products(KernelTable& t) {
  t.layout = Layout::kPanels;
  t.pack = pack;
  t.gemm = avx512_gemm;
  t.gemm_transposed = gemm_transposed;
}

}  // namespace tandem::cpu
