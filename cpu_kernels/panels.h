// The order of every product over panels of weights (kernels.h, Layout::kPanels). Each instruction
// set's files include it and bring their own tiles.
#pragma once
#include <cstdint>

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

// Sums of one row of x with the rows of a group of panels.
using Sum = float[kGroupRows];

// A block of columns of some panels, each of whose rows has one scale there.
struct Block {
  alignas(64) float scale[kGroup][kPanelRows];
  const char* w[kGroup];      // the first step
  const char* ahead[kGroup];  // what to prefetch when the first step is read, and so on
  int n_panels, col, n;       // columns [col, col + n)
  char* wide;                 // room for the same steps widened, where a tile makes them
};

// sums[i] += scale * x[i] . w for the rows of x that a tile is made for, at the block's first
// column, and for panels from `panel` on: one, or all of a group.
using Tile = void (*)(const char* const* x, const Block& b, int panel, Sum* sums);
struct Tiles {
  Tile one, group;
};

// Fetches n bytes of some rows of x from `offset` on: rows lie anywhere, no hardware foresees them.
void prefetch_rows(const Activations& x, int first, int m, int64_t offset, int n) {
  for (int i = first; i < first + m; ++i)
    for (int c = 0; c < n; c += 64) __builtin_prefetch(x_row(x, i) + offset + c);
}

// Rows [first, first + m) of x with one block, by the tiles for 1, 2, .. kMaxRows rows; as few tiles
// as possible, of about the same size. Meanwhile the rows of the next tile are fetched.
template <int kMaxRows>
void add_rows(const GemmArgs& a, const Tiles (&tiles)[kMaxRows], const Block& b, int element_bytes,
              int first, int m, Sum* sums) {
  const int64_t offset = int64_t{b.col} * element_bytes;
  const int n_tiles = (m + kMaxRows - 1) / kMaxRows;
  for (int i = 0, rows, tile = 0; tile < n_tiles; ++tile, i += rows) {
    rows = (m - i) / (n_tiles - tile);
    const char* x[kMaxRows];
    for (int r = 0; r < rows; ++r) x[r] = x_row(a.x, first + i + r) + offset;
    const int after = first + i + rows;
    prefetch_rows(a.x, after, min(kMaxRows, a.m - after), offset, b.n * element_bytes);
    const Tiles& t = tiles[rows - 1];
    if (b.n_panels == kGroup) {
      t.group(x, b, 0, sums + i);
    } else {
      for (int p = 0; p < b.n_panels; ++p) t.one(x, b, p, sums + i);
    }
  }
}

// How many columns from `col` on, at most n, have the same scales.
int same_scale(const Weight& w, int col, int n) {
  return w.scales ? min(n, w.block_cols - (w.col0 + col) % w.block_cols) : n;
}

void fill(float* to, float value) {
  for (int r = 0; r < kPanelRows; ++r) to[r] = value;
}

// The scales of the 16 rows of a panel at a column. A panel's last rows may lie past the matrix.
void panel_scales(const Weight& w, int64_t panel, int col, float* scale) {
  if (!w.scales) return fill(scale, 1);
  if (w.block_rows == 1) {
    const float* from = w.scales + panel * w.scale_stride + col / w.block_cols * kPanelRows;
    __builtin_memcpy(scale, from, kPanelRows * sizeof(float));
    return;
  }
  const float* scales = w.scales + (w.col0 + col) / w.block_cols;
  const int64_t row = w.row0 + panel * kPanelRows;
  const int64_t first = row / w.block_rows, last = (row + kPanelRows - 1) / w.block_rows;
  if (first == last) return fill(scale, scales[first * w.scale_stride]);
  for (int r = 0; r < kPanelRows; ++r) {
    const int64_t block = (row + r) / w.block_rows;
    scale[r] = scales[(block < w.n_scale_rows ? block : w.n_scale_rows - 1) * w.scale_stride];
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

// Copies what was asked for of the sums of rows [first, first + m) of x. From kU8 the offset of its
// codes is taken off.
void store(const Sum* sums, const GemmArgs& a, const PanelRange& range, int first, int m, int panel,
           int n_panels) {
  const bool u8 = a.x.type == ActivationType::kU8;
  for (int p = 0; p < n_panels; ++p) {
    const int j = (panel + p) * kPanelRows - range.skip;  // of the output
    const int begin = j < 0 ? -j : 0, end = min(kPanelRows, a.n - j);
    const float* const offset =
        a.w.scales + (range.first + panel + p + 1) * a.w.scale_stride - kPanelRows;
    for (int i = first; i < first + m; ++i) {
      const float* const sum = sums[i - first] + p * kPanelRows;
      float* const out = a.out + i * a.out_stride + j;
      const float scale = u8 ? a.x.scales[a.x.rows ? a.x.rows[i] : i] : 1;
      for (int r = begin; r < end; ++r) out[r] = u8 ? (sum[r] - offset[r]) * scale : sum[r];
    }
  }
}

constexpr int kPrefetchAhead =
    4096;  // bytes of a panel between what is read and what is prefetched

// What lies kPrefetchAhead after `offset` in the panels read one after another: this one, the same
// of the next group, the same of the next product.
const char* ahead_of(const GemmArgs& a, const PanelRange& range, int panel, int64_t offset) {
  const int64_t end = panel_bytes(a.w.type, a.k);
  const char* const base = bytes(a.w.data) + (range.first + panel) * a.w.stride;
  const int64_t after = offset + kPrefetchAhead - end;
  if (after < 0) return base + offset + kPrefetchAhead;
  if (after >= end) return base;
  if (panel + kGroup < range.n) return base + kGroup * a.w.stride + after;
  if (!a.next) return base;
  const int64_t next = a.next_row / kPanelRows + panel % kGroup;
  return bytes(a.next->data) + next * a.next->stride + after;
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
          const int64_t offset = b.col / per_step * kStepBytes;
          b.w[p] = bytes(a.w.data) + at * a.w.stride + offset;
          b.ahead[p] = ahead_of(a, range, panel + p, offset);
          panel_scales(a.w, at, b.col, b.scale[p]);
        }
        add_block(b, first, m, sums);
      }
      store(sums, a, range, first, m, panel, b.n_panels);
    }
  }
}

}  // namespace
}  // namespace tandem::cpu
