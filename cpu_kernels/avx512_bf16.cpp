// Products of BF16 activations with BF16 and FP8 weights: VDPBF16PS multiplies two columns of 16
// rows at a time. FP8 is widened, exactly, block by block in the level-1 cache.
#include "cpu_kernels/avx512_panels.h"

namespace tandem::cpu {

void avx512_gemm_f32(const GemmArgs&);

namespace {

constexpr int kBlock = 256;      // columns summed together where no scale changes
constexpr int kWideBlock = 128;  // of FP8: 16 KiB of BF16 in a group
constexpr int kPrefetch = 4096;  // bytes ahead in a panel

// sums[i] += scale * x[i] . w over all steps, for M rows and N panels; steps of one panel follow
// each other.
template <int M, int N>
void tile(const char* const* x, const char* const* w, int n_steps, const __m512* scale,
          float (*sums)[kGroupRows]) {
  __m512 acc[M][N] = {};
  for (int s = 0; s < n_steps; ++s) {
    __m512bh ws[N];
    for (int p = 0; p < N; ++p) ws[p] = (__m512bh)_mm512_load_si512(w[p] + s * kStepBytes);
    for (int i = 0; i < M; ++i) {
      int pair;
      __builtin_memcpy(&pair, x[i] + s * 4, 4);
      const __m512bh xs = (__m512bh)_mm512_set1_epi32(pair);
      for (int p = 0; p < N; ++p) acc[i][p] = _mm512_dpbf16_ps(acc[i][p], xs, ws[p]);
    }
  }
  for (int i = 0; i < M; ++i)
    for (int p = 0; p < N; ++p) {
      float* sum = sums[i] + p * kPanelRows;
      _mm512_store_ps(sum, _mm512_fmadd_ps(acc[i][p], scale[p], _mm512_load_ps(sum)));
    }
}

template <int M>
void tiles(const char* const* x, const char* const* w, int n_steps, const __m512* scale,
           int n_panels, float (*sums)[kGroupRows]) {
  if (n_panels == kGroup) return tile<M, kGroup>(x, w, n_steps, scale, sums);
  for (int p = 0; p < n_panels; ++p)
    tile<M, 1>(x, w + p, n_steps, scale + p,
               reinterpret_cast<float(*)[kGroupRows]>(&sums[0][p * kPanelRows]));
}

void add_block(const GemmArgs& a, int first, int m, const char* const* w, int col, int n_steps,
               const __m512* scale, int n_panels, Sums& sums) {
  for (int i = 0; i < m; i += 6) {
    const char* x[6];
    const int rows = min(6, m - i);
    for (int r = 0; r < rows; ++r) x[r] = x_row(a.x, first + i + r) + col * sizeof(bf16);
    constexpr decltype(&tiles<1>) kTiles[] = {tiles<1>, tiles<2>, tiles<3>,
                                              tiles<4>, tiles<5>, tiles<6>};
    kTiles[rows - 1](x, w, n_steps, scale, n_panels, sums + i);
  }
}

// FP8 steps of one panel to BF16 steps.
void widen_panel(const char* from, int n_steps, char* to) {
  const E4m3Table table;
  for (int s = 0; s < n_steps; ++s, from += kStepBytes, to += 2 * kStepBytes) {
    _mm_prefetch(from + kPrefetch, _MM_HINT_T0);
    __m512i first, second;
    widen_e4m3(table, _mm512_load_si512(from), &first, &second);
    _mm512_store_si512(to, first);
    _mm512_store_si512(to + kStepBytes, second);
  }
}

void gemm_bf16(const GemmArgs& a) {
  alignas(64) Sums sums;
  alignas(64) char wide[kGroup][kWideBlock / 2 * kStepBytes];
  const bool fp8 = a.w.type == WeightType::kF8E4M3;
  const int per_step = columns_of_step(a.w.type);
  const PanelRange range = panels_of(a);
  for (int panel = 0; panel < range.n; panel += kGroup) {
    const int n_panels = min(kGroup, range.n - panel);
    for (int first = 0; first < a.m; first += kChunk) {
      const int m = min(kChunk, a.m - first);
      __builtin_memset(sums, 0, m * sizeof(sums[0]));
      for (int col = 0, n; col < a.k; col += n) {
        n = same_scale(a.w, col, min(fp8 ? kWideBlock : kBlock, a.k - col));
        const int n_steps = (n + per_step - 1) / per_step;
        __m512 scale[kGroup];
        const char* w[kGroup];
        for (int p = 0; p < n_panels; ++p) {
          const int64_t at = range.first + panel + p;
          w[p] = bytes(a.w.data) + at * a.w.stride + col / per_step * kStepBytes;
          scale[p] = panel_scales(a.w, at, col);
          if (!fp8) continue;
          widen_panel(w[p], n_steps, wide[p]);
          w[p] = wide[p];
        }
        add_block(a, first, m, w, col, fp8 ? 2 * n_steps : n_steps, scale, n_panels, sums);
      }
      store(sums, a, range.skip, first, m, panel, n_panels);
    }
  }
}

void gemm(const GemmArgs& a) {
  return a.x.type == ActivationType::kF32 ? avx512_gemm_f32(a) : gemm_bf16(a);
}

void encode(const EncodeArgs& a) {
  bf16* to = static_cast<bf16*>(a.to);
  for (int c = 0; c < a.k; c += 32) {
    const int left = min(32, a.k - c);
    const __mmask32 mask = left == 32 ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
    const __m512 low = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), a.from + c);
    const __m512 high = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), a.from + c + 16);
    _mm512_store_si512(to + c, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
  const int written = (a.k + 31) / 32 * 32;
  const int padded = (a.k + kActivationMultiple - 1) / kActivationMultiple * kActivationMultiple;
  __builtin_memset(to + written, 0, (padded - written) * sizeof(bf16));
}

}  // namespace

void install_avx512_bf16(KernelTable& t) {
  t.activation[static_cast<int>(WeightType::kBF16)] = ActivationType::kBF16;
  t.activation[static_cast<int>(WeightType::kF8E4M3)] = ActivationType::kBF16;
  t.encode = encode;
  t.gemm = gemm;
}

}  // namespace tandem::cpu
