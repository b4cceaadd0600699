// What the AVX-512 product files share: panels of weights (kernels.h, Layout::kPanels), their
// widening, and the loop over blocks of columns.
#pragma once
#include <immintrin.h>

#include "cpu_kernels/kernels.h"

namespace tandem::cpu {
namespace {

constexpr int kGroup = 4;                        // panels computed together
constexpr int kGroupRows = kGroup * kPanelRows;  // their rows, output columns
constexpr int kChunk = 256;                      // rows of x for which sums are kept

int min(int a, int b) { return a < b ? a : b; }

const char* bytes(const void* p) { return static_cast<const char*>(p); }

const char* x_row(const Activations& x, int i) {
  return bytes(x.data) + (x.rows ? x.rows[i] : i) * x.stride;
}

// ---------------------------------------------------------------------------------- E4M3

// The magnitude bits of an E4M3 code choose the two bytes of its value in BF16, which holds every
// one exactly.
struct E4m3Bytes {
  uint8_t low[128], high[128];
};

constexpr E4m3Bytes e4m3_bytes() {
  E4m3Bytes t{};
  for (int code = 0; code < 128; ++code) {
    int exponent = code >> 3, mantissa = code & 7;
    int bits = 0;
    if (exponent > 0) {
      bits = (exponent + 120) << 7 | mantissa << 4;
    } else if (mantissa > 0) {  // mantissa * 2^-9
      int shift = 0;
      while ((mantissa << shift & 8) == 0) ++shift;
      bits = (121 - shift) << 7 | (mantissa << shift & 7) << 4;
    }
    t.low[code] = static_cast<uint8_t>(bits & 0xff);
    t.high[code] = static_cast<uint8_t>(bits >> 8);
  }
  return t;
}

alignas(64) constexpr E4m3Bytes kE4m3Bytes = e4m3_bytes();

struct E4m3Table {
  __m512i low0 = _mm512_load_si512(kE4m3Bytes.low), low1 = _mm512_load_si512(kE4m3Bytes.low + 64);
  __m512i high0 = _mm512_load_si512(kE4m3Bytes.high),
          high1 = _mm512_load_si512(kE4m3Bytes.high + 64);
  __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
};

// One FP8 step to two BF16 steps.
void widen_e4m3(const E4m3Table& t, __m512i codes, __m512i* first, __m512i* second) {
  const __m512i low = _mm512_permutex2var_epi8(t.low0, codes, t.low1);
  const __m512i magnitude = _mm512_permutex2var_epi8(t.high0, codes, t.high1);
  const __m512i high = _mm512_ternarylogic_epi32(magnitude, codes, t.sign, 0xf8);  // a | (b & c)
  *first = _mm512_unpacklo_epi8(low, high);
  *second = _mm512_unpackhi_epi8(low, high);
}

// ------------------------------------------------------------------------------- scales

// How many columns from `col` on, at most n, have the same scales.
int same_scale(const Weight& w, int col, int n) {
  return w.scales ? min(n, w.block_cols - (w.col0 + col) % w.block_cols) : n;
}

// The scales of the 16 rows of a panel at a column.
__m512 panel_scales(const Weight& w, int64_t panel, int col) {
  if (!w.scales) return _mm512_set1_ps(1);
  const float* scales = w.scales + (w.col0 + col) / w.block_cols;
  const int64_t row = w.row0 + panel * kPanelRows;
  const int64_t first = row / w.block_rows, last = (row + kPanelRows - 1) / w.block_rows;
  if (first == last) return _mm512_set1_ps(scales[first * w.scale_stride]);
  alignas(64) float s[kPanelRows];
  const int64_t n_blocks = w.n_scale_rows;
  for (int r = 0; r < kPanelRows; ++r) {
    const int64_t block = (row + r) / w.block_rows;
    s[r] = scales[(block < n_blocks ? block : n_blocks - 1) * w.scale_stride];
  }
  return _mm512_load_ps(s);
}

// ------------------------------------------------------------------------------- results

// Panels [first, first + n) cover the rows asked for.
struct PanelRange {
  int64_t first;
  int n, skip;  // rows of the first panel that were not asked for
};

PanelRange panels_of(const GemmArgs& a) {
  const int64_t first = a.first_row / kPanelRows;
  const int skip = static_cast<int>(a.first_row % kPanelRows);
  return {first, (skip + a.n + kPanelRows - 1) / kPanelRows, skip};
}

// Sums of rows of x with the rows of one group of panels.
using Sums = float[kChunk][kGroupRows];

// Copies what was asked for: sums of rows [first, first + m) of x and `panel`, counted from the
// range's first, on.
void store(const Sums& sums, const GemmArgs& a, int skip, int first, int m, int panel,
           int n_panels) {
  for (int p = 0; p < n_panels; ++p) {
    const int j = (panel + p) * kPanelRows - skip;  // of the output
    const int begin = j < 0 ? -j : 0, end = min(kPanelRows, a.n - j);
    const auto mask = static_cast<__mmask16>((1u << end) - (1u << begin));
    for (int i = 0; i < m; ++i)
      _mm512_mask_storeu_ps(a.out + (first + i) * a.out_stride + j, mask,
                            _mm512_load_ps(sums[i] + p * kPanelRows));
  }
}

}  // namespace
}  // namespace tandem::cpu
