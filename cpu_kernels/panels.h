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

// Rows [first, first + m) of x with one block, by the tiles for 1, 2, .. kMaxRows rows; as few
// tiles as possible, of about the same size. Meanwhile the rows of the next tile are fetched.
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

// The same when some tiles do what only the first rows must: fetch what comes after the block.
template <int kMaxRows>
void add_rows(const GemmArgs& a, const Tiles (&first_tiles)[kMaxRows],
              const Tiles (&tiles)[kMaxRows], const Block& b, int element_bytes, int first, int m,
              Sum* sums) {
  const int n = min(m, kMaxRows);
  add_rows(a, first_tiles, b, element_bytes, first, n, sums);
  add_rows(a, tiles, b, element_bytes, first + n, m - n, sums + n);
}

// The same for weights that are widened: `few` rows widen in registers; of more, as many as there
// are tiles in `widening` leave the widened steps in `room`, panel_bytes a panel, for all others.
template <int kFew, int kWidening, int kMaxRows>
void add_widened_rows(const GemmArgs& a, const Tiles (&few)[kFew],
                      const Tiles (&widening)[kWidening], const Tiles (&tiles)[kMaxRows], Block& b,
                      char* room, int panel_bytes, int element_bytes, int first, int m, Sum* sums) {
  if (m <= kFew) return add_rows(a, few, b, element_bytes, first, m, sums);
  b.wide = room;
  add_rows(a, widening, b, element_bytes, first, kWidening, sums);
  for (int p = 0; p < b.n_panels; ++p) b.w[p] = room + p * panel_bytes;
  add_rows(a, tiles, b, element_bytes, first + kWidening, m - kWidening, sums + kWidening);
}

// For codes that stand for a multiple of the values.
inline void multiply_scales(Block& b, float factor) {
  for (int p = 0; p < b.n_panels; ++p)
    for (float& scale : b.scale[p]) scale *= factor;
}

void fill(float* to, float value) {
  for (int r = 0; r < kPanelRows; ++r) to[r] = value;
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
        u8 ? a.w.scales + (range.first + panel + p + 1) * a.w.scale_stride - kPanelRows : nullptr;
    for (int i = first; i < first + m; ++i) {
      const float* const sum = sums[i - first] + p * kPanelRows;
      float* const out = a.out + i * a.out_stride + j;
      const float scale = u8 ? a.x.scales[a.x.rows ? a.x.rows[i] : i] : 1;
      for (int r = begin; r < end; ++r) out[r] = u8 ? (sum[r] - offset[r]) * scale : sum[r];
    }
  }
}

constexpr int kPrefetchAhead = 4096;  // bytes of a panel between what is read and what is fetched

// What is read after a panel: the same of the next group, or of the next product, or nothing new.
const char* panel_after(const GemmArgs& a, const PanelRange& range, int panel) {
  if (panel + kGroup < range.n || !a.next)
    return bytes(a.w.data) + (range.first + min(panel + kGroup, range.n - 1)) * a.w.stride;
  return bytes(a.next->data) + (a.next_row / kPanelRows + panel % kGroup) * a.next->stride;
}

// The scales of a panel, one block of columns after another.
class PanelScales {
 public:
  PanelScales() = default;
  PanelScales(const Weight& w, int64_t panel) {
    if (!w.scales) return;
    if (w.block_rows == 1) {
      kind_ = Kind::kRows;
      rows_[0] = w.scales + panel * w.scale_stride;
      return;
    }
    const int64_t row = w.row0 + panel * kPanelRows;
    const int64_t first = row / w.block_rows, last = (row + kPanelRows - 1) / w.block_rows;
    kind_ = first == last ? Kind::kOne : Kind::kSeveral;
    rows_[0] = w.scales + first * w.scale_stride;
    if (first == last) return;
    for (int r = 0; r < kPanelRows; ++r) {  // the panel's last rows may lie past the matrix
      const int64_t block = (row + r) / w.block_rows;
      rows_[r] = w.scales + (block < w.n_scale_rows ? block : w.n_scale_rows - 1) * w.scale_stride;
    }
  }

  // Those of 16 rows in a block of columns.
  void read(int block, float* scale) const {
    switch (kind_) {
      case Kind::kNone:
        return fill(scale, 1);
      case Kind::kOne:
        return fill(scale, rows_[0][block]);
      case Kind::kRows:
        __builtin_memcpy(scale, rows_[0] + block * kPanelRows, kPanelRows * sizeof(float));
        return;
      case Kind::kSeveral:
        for (int r = 0; r < kPanelRows; ++r) scale[r] = rows_[r][block];
    }
  }

 private:
  enum class Kind { kNone, kOne, kRows, kSeveral } kind_ = Kind::kNone;
  const float* rows_[kPanelRows];
};

// The blocks of columns that have the same scales, one after another.
class ScaleColumns {
 public:
  explicit ScaleColumns(const Weight& w) {
    if (!w.scales) return;
    width_ = w.block_cols;
    next_ = w.col0 / width_;
    left_ = width_ - w.col0 % width_;
  }
  // How many columns, at most n, come next with the scales of block().
  int take(int n) {
    block_ = next_;
    if (width_ == 0) return n;
    const int taken = min(n, left_);
    left_ -= taken;
    if (left_ == 0) {
      ++next_;
      left_ = width_;
    }
    return taken;
  }
  int block() const { return block_; }

 private:
  int width_ = 0, block_ = 0, next_ = 0, left_ = 0;
};

// The order of every product: a group of panels, a chunk of rows of x, blocks of columns.
// add_block(block, first, m, sums) adds the block's part to the sums of rows [first, first + m).
template <class AddBlock>
void multiply(const GemmArgs& a, int max_columns, AddBlock add_block) {
  alignas(64) Sum sums[kChunk];
  const PanelRange range = panels_of(a);
  const int step_shift = __builtin_ctz(columns_of_step(a.w.type));
  const int64_t panel_end = panel_bytes(a.w.type, a.k);
  for (int panel = 0; panel < range.n; panel += kGroup) {
    const int n_panels = min(kGroup, range.n - panel);
    Block b;
    b.n_panels = n_panels;
    const char *base[kGroup], *after[kGroup];
    PanelScales scales[kGroup];
    for (int p = 0; p < n_panels; ++p) {
      base[p] = bytes(a.w.data) + (range.first + panel + p) * a.w.stride;
      after[p] = panel_after(a, range, panel + p);
      scales[p] = PanelScales(a.w, range.first + panel + p);
    }
    for (int first = 0; first < a.m; first += kChunk) {
      const int m = min(kChunk, a.m - first);
      __builtin_memset(sums, 0, m * sizeof(Sum));
      ScaleColumns columns(a.w);
      for (b.col = 0; b.col < a.k; b.col += b.n) {
        b.n = columns.take(min(max_columns, a.k - b.col));
        const int64_t offset = int64_t{b.col >> step_shift} * kStepBytes;
        const int64_t ahead = offset + kPrefetchAhead - panel_end;
        for (int p = 0; p < n_panels; ++p) {
          b.w[p] = base[p] + offset;
          b.ahead[p] = ahead < 0 ? base[p] + offset + kPrefetchAhead : after[p] + ahead;
          scales[p].read(columns.block(), b.scale[p]);
        }
        add_block(b, first, m, sums);
      }
      store(sums, a, range, first, m, panel, n_panels);
    }
  }
}

}  // namespace
}  // namespace tandem::cpu
