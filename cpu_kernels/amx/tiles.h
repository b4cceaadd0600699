// AMX tile products: 32 rows of x by 32 rows of w at a time. docs/measurements/amx_counts.md counts
// the loop's instructions.
#pragma once
#include <immintrin.h>

#include "cpu_kernels/amx/config.h"
#include "cpu_kernels/avx512/panels.h"

namespace tandem::cpu {
namespace {

// Up to this many rows of x use vector instructions: a tile costs as much for one row as for 16. By
// instruction count the two are equal at 2 rows of FP8.
constexpr int kFewRows = 2;

// The two kinds of product. A block has at most kColumns columns: FP8 scales change there, and its
// data fits the level-1 cache. multiply_<x tile><w tile>.
struct Bf16Product {
  static constexpr int kElementBytes = 2, kColumns = 128;
  static void multiply_00() { _tile_dpbf16ps(0, 4, 6); }
  static void multiply_01() { _tile_dpbf16ps(1, 4, 7); }
  static void multiply_10() { _tile_dpbf16ps(2, 5, 6); }
  static void multiply_11() { _tile_dpbf16ps(3, 5, 7); }
  static __m512 result(__m512i r) { return _mm512_castsi512_ps(r); }
};

struct ByteProduct {
  static constexpr int kElementBytes = 1, kColumns = 512;
  static void multiply_00() { _tile_dpbusd(0, 4, 6); }
  static void multiply_01() { _tile_dpbusd(1, 4, 7); }
  static void multiply_10() { _tile_dpbusd(2, 5, 6); }
  static void multiply_11() { _tile_dpbusd(3, 5, 7); }
  static __m512 result(__m512i r) { return _mm512_cvtepi32_ps(r); }
};

// [row of x][row of w] of the four accumulators: floats, or integers.
using Results = int32_t[2 * kTileRows][2 * kTileRows];

// Buffers of a block of columns: widened weights, tiles of x, and results. With weights used in
// place, tiles of x (8 KiB of BF16 or 16 KiB of bytes) and results stay in the level-1 cache.
template <class Product>
struct alignas(64) Room {
  static constexpr int kTiles = Product::kColumns * Product::kElementBytes / kStepBytes;
  static constexpr int kBytes = kTiles * kTileBytes;
  char w[kGroup][kBytes];
  char x[2][kBytes];
  Results results;
};

// BF16 and INT8 weights are stored as B tiles. Tiles within which a scale changes are copied.
template <class Product>
void tiles_in_place(Block& b, int columns_per_step, Room<Product>& room) {
  const int n_bytes = (b.n + columns_per_step - 1) / columns_per_step * kStepBytes;
  const bool in_place = b.col % (kStepsMultiple * columns_per_step) == 0;
  for (int p = 0; p < b.n_panels; ++p) {
    for (int i = 0; i < n_bytes; i += kStepBytes) _mm_prefetch(b.ahead[p] + i, _MM_HINT_T0);
    if (in_place) continue;
    __builtin_memset(room.w[p], 0, room.kBytes);
    __builtin_memcpy(room.w[p], b.w[p], n_bytes);
    b.w[p] = room.w[p];
  }
}

// For FP8 and INT4: widen(panel, s, step, &first, &second) makes two steps of step s of a panel.
template <class Product, class Widen>
void widen_tiles(Block& b, int columns_per_step, Room<Product>& room, Widen widen) {
  const int n_steps = (b.n + columns_per_step - 1) / columns_per_step;
  for (int p = 0; p < b.n_panels; ++p) {
    const char* from = b.w[p];
    char* to = room.w[p];
    for (int s = 0; s < n_steps; ++s, from += kStepBytes, to += 2 * kStepBytes) {
      _mm_prefetch(b.ahead[p] + s * kStepBytes, _MM_HINT_T0);
      __m512i first, second;
      widen(p, s, _mm512_load_si512(from), &first, &second);
      _mm512_store_si512(to, first);
      _mm512_store_si512(to + kStepBytes, second);
    }
    for (; (to - room.w[p]) % kTileBytes != 0; to += kStepBytes)
      _mm512_store_si512(to, _mm512_setzero_si512());
    b.w[p] = room.w[p];
  }
}

// Copies rows of x to A tiles in units of 64 bytes: load(from, tile). Missing rows are 0.
template <int kBytes, class Load>
void gather(const GemmArgs& a, int first_byte, int first, int n_rows, char (&to)[2][kBytes],
            Load load) {
  constexpr int kTiles = kBytes / kTileBytes;
  for (int i = 0; i < 2; ++i) {
    char* row = to[i];
    const int n = min(kTileRows, n_rows - i * kTileRows);
    for (int r = 0; r < n; ++r, row += kStepBytes) {
      const char* x = x_row(a.x, first + i * kTileRows + r) + first_byte;
#pragma GCC unroll 8
      for (int t = 0; t < kTiles; ++t)
        _mm512_store_si512(row + t * kTileBytes, load(x + t * kStepBytes, t));
    }
    for (; row < to[i] + kTileBytes; row += kStepBytes)
      for (int t = 0; t < kTiles; ++t)
        _mm512_store_si512(row + t * kTileBytes, _mm512_setzero_si512());
  }
}

// Copies n_bytes of each row, followed by zeros.
template <int kBytes>
void gather(const GemmArgs& a, int first_byte, int n_bytes, int first, int n_rows,
            char (&to)[2][kBytes]) {
  constexpr int kTiles = kBytes / kTileBytes;
  if (n_bytes == kTiles * kStepBytes)
    return gather(a, first_byte, first, n_rows, to,
                  [](const char* x, int) { return _mm512_loadu_si512(x); });
  __mmask64 masks[kTiles];
  for (int t = 0; t < kTiles; ++t) {
    const int left = n_bytes - t * kStepBytes;
    masks[t] = left <= 0 ? 0 : left < kStepBytes ? (__mmask64{1} << left) - 1 : ~__mmask64{0};
  }
  gather(a, first_byte, first, n_rows, to,
         [&](const char* x, int t) { return _mm512_maskz_loadu_epi8(masks[t], x); });
}

// Results of a product that are not yet added to the sums. They are added during the next product,
// while the vector units are idle, and before its results overwrite them.
template <class Product>
struct Pending {
  const int32_t* results;  // [n_rows][2 panels], still to be added
  float* sums;             // sums of the first panel
  const float* const* scales;
  int n_panels, n_rows;

  void add(int n) {
    n = min(n, n_rows);
    n_panels == 2 ? add<2>(n) : add<1>(n);
    results += n * 2 * kPanelRows;
    sums += n * kGroupRows;
    n_rows -= n;
  }

 private:
  template <int kPanels>
  void add(int n) const {
    const int32_t* from = results;
    float* to = sums;
    __m512 scale[kPanels];
    for (int p = 0; p < kPanels; ++p) scale[p] = _mm512_loadu_ps(scales[p]);
    for (int i = 0; i < n; ++i, from += 2 * kPanelRows, to += kGroupRows)
      for (int p = 0; p < kPanels; ++p) {
        float* sum = to + p * kPanelRows;
        const __m512 result = Product::result(_mm512_load_si512(from + p * kPanelRows));
        _mm512_store_ps(sum, _mm512_fmadd_ps(result, scale[p], _mm512_load_ps(sum)));
      }
  }
};

// results = x . w for kRowTiles times 16 rows of x and kPanels panels.
template <class Product, int kRowTiles, int kPanels>
void tile_product(const char* const* x, const char* const* w, int n_tiles,
                  Pending<Product>& pending, Results& results) {
  const int rows_per_tile = (2 * kTileRows + n_tiles - 1) / n_tiles;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int at = 0; at < n_tiles * kTileBytes; at += kTileBytes) {
    _tile_loadd(4, x[0] + at, kStepBytes);
    _tile_loadd(6, w[0] + at, kStepBytes);
    Product::multiply_00();
    if constexpr (kPanels == 2) {
      _tile_loadd(7, w[1] + at, kStepBytes);
      Product::multiply_01();
    }
    if constexpr (kRowTiles == 2) {
      _tile_loadd(5, x[1] + at, kStepBytes);
      Product::multiply_10();
      if constexpr (kPanels == 2) Product::multiply_11();
    }
    pending.add(rows_per_tile);
    order_memory();
  }
  _tile_stored(0, results, sizeof(results[0]));
  if constexpr (kPanels == 2) _tile_stored(1, &results[0][kTileRows], sizeof(results[0]));
  if constexpr (kRowTiles == 2) {
    _tile_stored(2, results[kTileRows], sizeof(results[0]));
    if constexpr (kPanels == 2) _tile_stored(3, &results[kTileRows][kTileRows], sizeof(results[0]));
  }
  order_memory();
}

// Adds a block whose weights are tiles to the sums of rows [first, first + m) of x.
template <class Product>
void add_tiles(const GemmArgs& a, const Block& b, int first, int m, Sum* sums,
               Room<Product>& room) {
  constexpr decltype(&tile_product<Product, 1, 1>) kProducts[2][2] = {
      {tile_product<Product, 1, 1>, tile_product<Product, 1, 2>},
      {tile_product<Product, 2, 1>, tile_product<Product, 2, 2>}};
  const int n_bytes = b.n * Product::kElementBytes;
  const int n_tiles = (n_bytes + kStepBytes - 1) / kStepBytes;
  const char* const x[2] = {room.x[0], room.x[1]};
  Pending<Product> pending = {room.results[0], sums[0], b.scale, 1, 0};
  for (int i = 0; i < m; i += 2 * kTileRows) {
    const int n_rows = min(2 * kTileRows, m - i);
    gather(a, b.col * Product::kElementBytes, n_bytes, first + i, n_rows, room.x);
    order_memory();
    for (int p = 0; p < b.n_panels; p += 2) {
      const int n_panels = min(2, b.n_panels - p);
      kProducts[n_rows > kTileRows][n_panels - 1](x, b.w + p, n_tiles, pending, room.results);
      pending = {room.results[0], sums[i] + p * kPanelRows, b.scale + p, n_panels, n_rows};
    }
  }
  pending.add(pending.n_rows);
}

}  // namespace
}  // namespace tandem::cpu
