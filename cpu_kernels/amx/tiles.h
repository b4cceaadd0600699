// AMX tile products: up to 32 rows of x by 32 or 64 rows of w at a time (docs/amx.md).
#pragma once
#include <immintrin.h>

#include "cpu_kernels/amx/config.h"
#include "cpu_kernels/avx512/panels.h"

namespace tandem::cpu {
namespace {

// Up to this many rows of x are multiplied with each tile of weights as it arrives from memory
// (add_few_rows). More rows take whole blocks of weights.
constexpr int kFewRows = 2 * kTileRows;

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

// The B tiles of a block of columns of w. make(panel, tile) makes one, and fetches as much of what
// the block's `ahead` points to; at(panel, tile) is where it then lies. The two classes are those
// of weights that are B tiles as stored, and of weights that are widened.

// BF16 and INT8. Tiles within which a scale changes are copied.
template <class Product>
class StoredTiles {
 public:
  StoredTiles(const Block& b, int columns_per_step, Room<Product>& room)
      : b_(b),
        room_(room),
        n_bytes_((b.n + columns_per_step - 1) / columns_per_step * kStepBytes),
        in_place_(b.col % (kStepsMultiple * columns_per_step) == 0) {}

  [[gnu::always_inline]] void make(int panel, int tile) {
    const int first = tile * kTileBytes, end = min(first + kTileBytes, n_bytes_);
    for (int i = first; i < end; i += kStepBytes) fetch_weights(b_.ahead[panel] + i);
    if (in_place_) return;
    char* const to = room_.w[panel];
    __builtin_memcpy(to + first, b_.w[panel] + first, end - first);
    __builtin_memset(to + end, 0, first + kTileBytes - end);
  }
  const char* at(int panel, int tile) const {
    return (in_place_ ? b_.w[panel] : room_.w[panel]) + tile * kTileBytes;
  }

 private:
  const Block& b_;
  Room<Product>& room_;
  const int n_bytes_;
  const bool in_place_;
};

// FP8 and INT4: widen(panel, s, step, &first, &second) makes two steps of step s of a panel.
template <class Product, class Widen>
class WidenedTiles {
 public:
  WidenedTiles(const Block& b, int columns_per_step, Room<Product>& room, Widen widen)
      : b_(b),
        room_(room),
        n_steps_((b.n + columns_per_step - 1) / columns_per_step),
        widen_(widen) {}

  [[gnu::always_inline]] void make(int panel, int tile) {
    const int first = tile * kStepsOfTile, n = min(kStepsOfTile, n_steps_ - first);
    const char* const from = b_.w[panel] + first * kStepBytes;
    const char* const ahead = b_.ahead[panel] + first * kStepBytes;
    char* const to = room_.w[panel] + tile * kTileBytes;
    const auto widen_step = [&](int i) {
      fetch_weights(ahead + i * kStepBytes);
      __m512i low, high;
      widen_(panel, first + i, _mm512_load_si512(from + i * kStepBytes), &low, &high);
      _mm512_store_si512(to + 2 * i * kStepBytes, low);
      _mm512_store_si512(to + (2 * i + 1) * kStepBytes, high);
    };
    if (n == kStepsOfTile) {
#pragma GCC unroll 8
      for (int i = 0; i < kStepsOfTile; ++i) widen_step(i);
      return;
    }
    for (int i = 0; i < n; ++i) widen_step(i);
    for (int i = 2 * n * kStepBytes; i < kTileBytes; i += kStepBytes)
      _mm512_store_si512(to + i, _mm512_setzero_si512());
  }
  const char* at(int panel, int tile) const { return room_.w[panel] + tile * kTileBytes; }

 private:
  static constexpr int kStepsOfTile = kStepsMultiple / 2;

  const Block& b_;
  Room<Product>& room_;
  const int n_steps_;
  Widen widen_;
};

// Tiles beside each other in a block of columns.
template <class Product>
int tiles_across(const Block& b) {
  return (b.n * Product::kElementBytes + kStepBytes - 1) / kStepBytes;
}

// A tiles of up to 32 rows of x in a block of columns: tile t of the first or second 16 rows is at
// at[i] + t * step[i].
struct RowTiles {
  const char* at[2];
  int step[2];
};

// Copies rows of x to A tiles in units of 64 bytes: load(from, tile). Missing rows are 0 if tiles
// have them.
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
    for (; a.m > kFewRows && row < to[i] + kTileBytes; row += kStepBytes)
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

// The tiles of rows [first, first + n_rows) of x, n_rows at most 32, in place or in the room.
template <class Product>
RowTiles tiles_of_rows(const GemmArgs& a, const Block& b, int first, int n_rows,
                       Room<Product>& room) {
  const int first_byte = b.col * Product::kElementBytes;
  if (!a.x.tiled) {
    gather(a, first_byte, b.n * Product::kElementBytes, first, n_rows, room.x);
    order_memory();
    return {{room.x[0], room.x[1]}, {kTileBytes, kTileBytes}};
  }
  RowTiles tiles;
  for (int i = 0; i < 2; ++i) {
    const int row = i * kTileRows < n_rows ? first + i * kTileRows : first;
    const int step = min(kTileRows, a.m - row) * kStepBytes;
    tiles.at[i] = bytes(a.x.data) + row * a.x.stride + int64_t{first_byte} / kStepBytes * step;
    tiles.step[i] = step;
  }
  return tiles;
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
void tile_product(const RowTiles& x, const char* const* w, int n_tiles, Pending<Product>& pending,
                  Results& results) {
  const int rows_per_tile = (2 * kTileRows + n_tiles - 1) / n_tiles;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int t = 0; t < n_tiles; ++t) {
    const int at = t * kTileBytes;
    _tile_loadd(4, x.at[0] + t * x.step[0], kStepBytes);
    _tile_loadd(6, w[0] + at, kStepBytes);
    Product::multiply_00();
    if constexpr (kPanels == 2) {
      _tile_loadd(7, w[1] + at, kStepBytes);
      Product::multiply_01();
    }
    if constexpr (kRowTiles == 2) {
      _tile_loadd(5, x.at[1] + t * x.step[1], kStepBytes);
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

// results = x . w for up to kRowTiles times 16 rows of x and for 4 / kRowTiles panels from `panel`
// on. With one tile of rows, tiles 4 and 5 both hold it, and results[16..] are those of the third
// and fourth panel. The next tiles of w are made between the products of these, so that memory
// answers at an even rate.
template <class Product, int kRowTiles, class Tiles>
void few_rows_product(const RowTiles& x, Tiles& tiles, int panel, int n_tiles, Results& results) {
  constexpr int kPanels = kGroup / kRowTiles;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int p = panel; p < panel + kPanels; ++p) tiles.make(p, 0);
  for (int t = 0; t < n_tiles; ++t) {
    const bool more = t + 1 < n_tiles;
    order_memory();
    _tile_loadd(4, x.at[0] + t * x.step[0], kStepBytes);
    _tile_loadd(5, x.at[kRowTiles - 1] + t * x.step[kRowTiles - 1], kStepBytes);
    _tile_loadd(6, tiles.at(panel, t), kStepBytes);
    Product::multiply_00();
    if constexpr (kRowTiles == 2) Product::multiply_10();
    if (more) tiles.make(panel, t + 1);
    _tile_loadd(7, tiles.at(panel + 1, t), kStepBytes);
    Product::multiply_01();
    if constexpr (kRowTiles == 2) Product::multiply_11();
    if (more) tiles.make(panel + 1, t + 1);
    if constexpr (kRowTiles == 1) {
      _tile_loadd(6, tiles.at(panel + 2, t), kStepBytes);
      Product::multiply_10();
      if (more) tiles.make(panel + 2, t + 1);
      _tile_loadd(7, tiles.at(panel + 3, t), kStepBytes);
      Product::multiply_11();
      if (more) tiles.make(panel + 3, t + 1);
    }
  }
  _tile_stored(0, results, sizeof(results[0]));
  _tile_stored(1, &results[0][kTileRows], sizeof(results[0]));
  _tile_stored(2, results[kTileRows], sizeof(results[0]));
  _tile_stored(3, &results[kTileRows][kTileRows], sizeof(results[0]));
  order_memory();
}

// Adds a block to the sums of rows [first, first + m) of x. Its tiles are made between the products
// of the first 32 rows, or, of fewer rows or panels, before all products.
template <class Product, class Tiles>
void add_many_rows(const GemmArgs& a, const Block& b, int first, int m, Sum* sums,
                   Room<Product>& room, Tiles& tiles) {
  constexpr decltype(&tile_product<Product, 1, 1>) kProducts[2][2] = {
      {tile_product<Product, 1, 1>, tile_product<Product, 1, 2>},
      {tile_product<Product, 2, 1>, tile_product<Product, 2, 2>}};
  const int n_tiles = tiles_across<Product>(b);
  const bool between = m >= 2 * kTileRows && b.n_panels == kGroup;
  const char* w[kGroup];
  for (int p = 0; p < b.n_panels; ++p) {
    for (int t = 0; t < n_tiles && !between; ++t) tiles.make(p, t);
    w[p] = tiles.at(p, 0);
  }
  Pending<Product> pending = {room.results[0], sums[0], b.scale, 1, 0};
  if (between) {
    const RowTiles x = tiles_of_rows(a, b, first, 2 * kTileRows, room);
    for (int p = 0; p < kGroup; p += 2) {
      pending.add(pending.n_rows);
      few_rows_product<Product, 2>(x, tiles, p, n_tiles, room.results);
      pending = {room.results[0], sums[0] + p * kPanelRows, b.scale + p, 2, 2 * kTileRows};
    }
  }
  for (int i = between ? 2 * kTileRows : 0; i < m; i += 2 * kTileRows) {
    const int n_rows = min(2 * kTileRows, m - i);
    const RowTiles x = tiles_of_rows(a, b, first + i, n_rows, room);
    for (int p = 0; p < b.n_panels; p += 2) {
      const int n_panels = min(2, b.n_panels - p);
      kProducts[n_rows > kTileRows][n_panels - 1](x, w + p, n_tiles, pending, room.results);
      pending = {room.results[0], sums[i] + p * kPanelRows, b.scale + p, n_panels, n_rows};
    }
  }
  pending.add(pending.n_rows);
}

// Adds a block to the sums of all rows of x, at most kFewRows. Tiles are configured for them.
template <class Product, class Tiles>
void add_few_rows(const GemmArgs& a, const Block& b, Sum* sums, Room<Product>& room, Tiles& tiles) {
  const int n_tiles = tiles_across<Product>(b);
  const RowTiles x = tiles_of_rows(a, b, 0, a.m, room);
  if (!a.x.tiled) prefetch_next_rows<kFewRows>(a, b, Product::kElementBytes, a.m);
  const auto add = [&](int first_result, int panel) {
    Pending<Product>{room.results[first_result], sums[0] + panel * kPanelRows, b.scale + panel, 2,
                     a.m}
        .add(a.m);
  };
  if (a.m <= kTileRows) {
    few_rows_product<Product, 1>(x, tiles, 0, n_tiles, room.results);
    add(0, 0);
    add(kTileRows, 2);
  } else {
    for (int p = 0; p < kGroup; p += 2) {
      few_rows_product<Product, 2>(x, tiles, p, n_tiles, room.results);
      add(0, p);
    }
  }
}

template <class Product, class Tiles>
void add_tiles(const GemmArgs& a, const Block& b, int first, int m, Sum* sums, Room<Product>& room,
               Tiles tiles) {
  if (a.m <= kFewRows && b.n_panels == kGroup) return add_few_rows(a, b, sums, room, tiles);
  add_many_rows(a, b, first, m, sums, room, tiles);
}

// Bytes of a panel that products fetch ahead: at least a block's. Few rows are as fast as memory,
// and with more in flight they lose less between products.
constexpr int kFastRows = 8;
int bytes_ahead(int m, int block_bytes) {
  return m <= kFastRows && block_bytes < kAheadOfMany ? kAheadOfMany : block_bytes;
}

// Configures tiles for a product's rows of x.
void configure_tiles_for(int m) {
  const bool few = m <= kFewRows;
  const int rows = few ? min(m, kTileRows) : kTileRows;
  configure_tiles(rows, few && m > kTileRows ? m - kTileRows : rows);
}

}  // namespace
}  // namespace tandem::cpu
