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

// ------------------------------------------------------------------------------- products

// Sums of one row of x with the rows of a group of panels.
using Sum = float[kGroupRows];

// A block of columns of some panels, each of whose rows has one scale there.
struct Block {
  const char* w[kGroup];  // the first step
  __m512 scale[kGroup];
  int n_panels, col, n;  // columns [col, col + n)
  char* wide;            // room for the same steps widened, where a tile makes them
};

// sums[i] += scale * x[i] . w for the rows of x that a tile is made for, at the block's first
// column, and for panels from `panel` on: one, or all of a group.
using Tile = void (*)(const char* const* x, const Block& b, int panel, Sum* sums);
struct Tiles {
  Tile one, group;
};

template <int M, int N>
void add_sums(const __m512 (&acc)[M][N], const Block& b, int panel, Sum* sums) {
  for (int i = 0; i < M; ++i)
    for (int p = 0; p < N; ++p) {
      float* sum = sums[i] + (panel + p) * kPanelRows;
      _mm512_store_ps(sum, _mm512_fmadd_ps(acc[i][p], b.scale[panel + p], _mm512_load_ps(sum)));
    }
}

// Rows [first, first + m) of x with one block, by the tiles for 1, 2, .. kMaxRows rows.
template <int kMaxRows>
void add_rows(const GemmArgs& a, const Tiles (&tiles)[kMaxRows], const Block& b, int element_bytes,
              int first, int m, Sum* sums) {
  for (int i = 0; i < m; i += kMaxRows) {
    const int rows = min(kMaxRows, m - i);
    const char* x[kMaxRows];
    for (int r = 0; r < rows; ++r)
      x[r] = x_row(a.x, first + i + r) + int64_t{b.col} * element_bytes;
    const Tiles& t = tiles[rows - 1];
    if (b.n_panels == kGroup) {
      t.group(x, b, 0, sums + i);
    } else {
      for (int p = 0; p < b.n_panels; ++p) t.one(x, b, p, sums + i);
    }
  }
}

// Panels that cover the rows asked for; the first `skip` rows of the first were not.
struct PanelRange {
  int64_t first;
  int n, skip;
};

PanelRange panels_of(const GemmArgs& a) {
  const int64_t first = a.first_row / kPanelRows;
  const int skip = static_cast<int>(a.first_row % kPanelRows);
  return {first, (skip + a.n + kPanelRows - 1) / kPanelRows, skip};
}

// Copies what was asked for of the sums of rows [first, first + m) of x.
void store(const Sum* sums, const GemmArgs& a, int skip, int first, int m, int panel,
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

// The order of every product: a group of panels, a chunk of rows of x, blocks of columns.
// add_block(block, first, m, sums) adds the block's part to the sums of rows [first, first + m).
template <class AddBlock>
void multiply(const GemmArgs& a, int max_columns, AddBlock add_block) {
  alignas(64) Sum sums[kChunk];
  const PanelRange range = panels_of(a);
  const int per_step = columns_of_step(a.w.type);
  for (int panel = 0; panel < range.n; panel += kGroup) {
    Block b;
    b.n_panels = min(kGroup, range.n - panel);
    for (int first = 0; first < a.m; first += kChunk) {
      const int m = min(kChunk, a.m - first);
      __builtin_memset(sums, 0, m * sizeof(Sum));
      for (b.col = 0; b.col < a.k; b.col += b.n) {
        b.n = same_scale(a.w, b.col, min(max_columns, a.k - b.col));
        for (int p = 0; p < b.n_panels; ++p) {
          const int64_t at = range.first + panel + p;
          b.w[p] = bytes(a.w.data) + at * a.w.stride + b.col / per_step * kStepBytes;
          b.scale[p] = panel_scales(a.w, at, b.col);
        }
        add_block(b, first, m, sums);
      }
      store(sums, a, range.skip, first, m, panel, b.n_panels);
    }
  }
}

}  // namespace
}  // namespace tandem::cpu
