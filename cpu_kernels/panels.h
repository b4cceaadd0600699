// Loop structure of all products over panels of weights (kernels.h, Layout::kPanels). The files of
// each instruction set include it and add their own tiles.
#pragma once
#include <cstdint>

#include "cpu_kernels/row_scales.h"

namespace tandem::cpu {
namespace {

constexpr int kGroup = 4;                        // panels computed together
constexpr int kGroupRows = kGroup * kPanelRows;  // rows of a group: output columns
constexpr int kChunk = 256;                      // rows of x with sums in memory at a time

int min(int a, int b) { return a < b ? a : b; }

const char* bytes(const void* p) { return static_cast<const char*>(p); }

const char* x_row(const Activations& x, int i) {
  return bytes(x.data) + (x.rows ? x.rows[i] : i) * x.stride;
}

// Sums of one row of x with the rows of a group of panels.
using Sum = float[kGroupRows];

// A block of columns of some panels, divided into parts in which every row has one scale.
struct Block {
  const float* scale[kGroup];  // [n / part][16]
  const bf16* stored[kGroup];  // the same as kI4 stores them, [n / part][4][16], if Order::stored
  const char* w[kGroup];       // the first step
  const char* ahead[kGroup];   // address to prefetch with the first step; later steps follow
  int n_panels, col, n;        // columns [col, col + n)
  int part;                    // columns of a part; a block has at most kMaxParts parts
  char* wide;                  // buffer for the block's widened steps
  int fetch, n_fetched;        // panels that a tile fetches, where tiles share the fetching
  // kI4TwoLevel: [n / group][4][16], offset to the panel's own 16.
  const int8_t* multipliers[kGroup];
  int group;
};
constexpr int kMaxParts = 16;

// sums[i] += scale * x[i] . w, part by part, for a fixed number of rows of x, which begin at the
// block's first column, and for one panel, `panel`, or all of a group.
using Tile = void (*)(const char* const* x, const Block& b, int panel, Sum* sums);
struct Tiles {
  Tile one, group;
};

// Prefetches n bytes of some rows of x from `offset` on: hardware does not predict gathered rows.
void prefetch_rows(const Activations& x, int first, int m, int64_t offset, int n) {
  for (int i = first; i < first + m; ++i)
    for (int c = 0; c < n; c += 64) __builtin_prefetch(x_row(x, i) + offset + c);
}

// Prefetches the rows of x that are multiplied after those before `after`: the next rows of this
// chunk, or its first rows at the next block.
template <int kMaxRows>
void prefetch_next_rows(const GemmArgs& a, const Block& b, int element_bytes, int after) {
  const int chunk = (after - 1) / kChunk * kChunk, end = min(a.m, chunk + kChunk);
  const bool again = after == end;
  const int first = again ? chunk : after;
  const int col = !again ? b.col : b.col + b.n < a.k ? b.col + b.n : 0;
  prefetch_rows(a.x, first, min(kMaxRows, end - first), int64_t{col} * element_bytes,
                b.n * element_bytes);
}

// Multiplies rows [first, first + m) of x with one block, in n_tiles of about equal size;
// tiles_of(tile, rows) selects the kernel.
template <int kMaxRows, class TilesOf>
void add_tiles_of(const GemmArgs& a, const Block& b, int element_bytes, int first, int m, Sum* sums,
                  int n_tiles, TilesOf tiles_of) {
  const int64_t offset = int64_t{b.col} * element_bytes;
  for (int i = 0, rows, tile = 0; tile < n_tiles; ++tile, i += rows) {
    rows = (m - i) / (n_tiles - tile);
    const char* x[kMaxRows];
    for (int r = 0; r < rows; ++r) x[r] = x_row(a.x, first + i + r) + offset;
    prefetch_next_rows<kMaxRows>(a, b, element_bytes, first + i + rows);
    const Tiles& t = tiles_of(tile, rows);
    if (b.n_panels == kGroup) {
      t.group(x, b, 0, sums + i);
    } else {
      for (int p = 0; p < b.n_panels; ++p) t.one(x, b, p, sums + i);
    }
  }
}

// Multiplies with as few tiles as possible. `tiles` has kernels for 1, 2, .. kMaxRows rows.
template <int kMaxRows>
void add_rows(const GemmArgs& a, const Tiles (&tiles)[kMaxRows], const Block& b, int element_bytes,
              int first, int m, Sum* sums) {
  add_tiles_of<kMaxRows>(a, b, element_bytes, first, m, sums, (m + kMaxRows - 1) / kMaxRows,
                         [&](int, int rows) -> const Tiles& { return tiles[rows - 1]; });
}

// Multiplies likewise; the first tile also prefetches what follows the block.
template <int kMaxRows>
void add_rows(const GemmArgs& a, const Tiles (&fetching)[kMaxRows], const Tiles (&tiles)[kMaxRows],
              const Block& b, int element_bytes, int first, int m, Sum* sums) {
  add_tiles_of<kMaxRows>(
      a, b, element_bytes, first, m, sums, (m + kMaxRows - 1) / kMaxRows,
      [&](int tile, int rows) -> const Tiles& { return (tile == 0 ? fetching : tiles)[rows - 1]; });
}

// Multiplies likewise; the first tiles share the prefetching, each for 4, 2 or 1 panels: a single
// burst would delay the rows of x. tile_for(rows) finds in `b` what its tile fetches.
template <int kMaxRows, class TileFor>
void add_rows_sharing(const GemmArgs& a, Block& b, int element_bytes, int first, int m, Sum* sums,
                      TileFor tile_for) {
  const int n_tiles = (m + kMaxRows - 1) / kMaxRows;
  const int each = n_tiles >= 4 ? 1 : n_tiles >= 2 ? 2 : kGroup;
  add_tiles_of<kMaxRows>(a, b, element_bytes, first, m, sums, n_tiles,
                         [&](int tile, int rows) -> const Tiles& {
                           b.fetch = tile * each;
                           b.n_fetched = b.fetch < kGroup ? each : 0;
                           return tile_for(rows);
                         });
}

// Multiplies likewise, with tiles for each number of panels to fetch.
template <int kMaxRows>
void add_rows(const GemmArgs& a, const Tiles (&fetch4)[kMaxRows], const Tiles (&fetch2)[kMaxRows],
              const Tiles (&fetch1)[kMaxRows], const Tiles (&tiles)[kMaxRows], Block& b,
              int element_bytes, int first, int m, Sum* sums) {
  add_rows_sharing<kMaxRows>(a, b, element_bytes, first, m, sums, [&](int rows) -> const Tiles& {
    const int n = b.n_fetched;
    return (n == kGroup ? fetch4 : n == 2 ? fetch2 : n == 1 ? fetch1 : tiles)[rows - 1];
  });
}

// Multiplies rows with weights that must be widened. Up to kFew rows are widened in registers. With
// more rows, the first kWidening rows also store the widened steps in `room`, panel_bytes per
// panel, for the other rows, and the first of those prefetch.
template <int kWidening, int kFew, int kMaxRows>
void add_widened_rows(const GemmArgs& a, const Tiles (&few)[kFew], const Tiles& widening,
                      const Tiles (&fetching)[kMaxRows], const Tiles (&tiles)[kMaxRows], Block& b,
                      char* room, int panel_bytes, int element_bytes, int first, int m, Sum* sums) {
  static_assert(kWidening <= kFew);
  if (m <= kFew) return add_rows(a, few, b, element_bytes, first, m, sums);
  b.wide = room;
  add_tiles_of<kWidening>(a, b, element_bytes, first, kWidening, sums, 1,
                          [&](int, int) -> const Tiles& { return widening; });
  for (int p = 0; p < b.n_panels; ++p) b.w[p] = room + p * panel_bytes;
  b.fetch = kGroup / 2;  // the first rows fetched for the other panels
  add_rows(a, fetching, tiles, b, element_bytes, first + kWidening, m - kWidening,
           sums + kWidening);
}

void fill(float* to, float value) {
  for (int r = 0; r < kPanelRows; ++r) to[r] = value;
}

// Panels that cover the requested rows; the first `skip` rows of the first panel are not requested.
struct PanelRange {
  int64_t first;
  int n, skip;
};

PanelRange panels_of(const GemmArgs& a) {
  const int64_t first = a.first_row / kPanelRows;
  const int skip = static_cast<int>(a.first_row % kPanelRows);
  return {first, (skip + a.n + kPanelRows - 1) / kPanelRows, skip};
}

// Stores the requested sums of rows [first, first + m) of x, times `unit`. With kU8 activations the
// offset of the codes is subtracted.
void store(const Sum* sums, float unit, const GemmArgs& a, const PanelRange& range, int first,
           int m, int panel, int n_panels) {
  const bool u8 = a.x.type == ActivationType::kU8;
  for (int p = 0; p < n_panels; ++p) {
    const int j = (panel + p) * kPanelRows - range.skip;  // output column
    const int begin = j < 0 ? -j : 0, end = min(kPanelRows, a.n - j);
    const float* const offset = u8 ? sums_of_rows(a.w, range.first + panel + p) : nullptr;
    for (int i = first; i < first + m; ++i) {
      const float* const sum = sums[i - first] + p * kPanelRows;
      float* const out = a.out + i * a.out_stride + j;
      const float scale = u8 ? a.x.scales[a.x.rows ? a.x.rows[i] : i] : 1;
      const auto store_rows = [&](int from, int to) {
        for (int r = from; r < to; ++r)
          out[r] = u8 ? (sum[r] * unit - offset[r]) * scale : sum[r] * unit;
      };
      if (end - begin == kPanelRows) {
        store_rows(0, kPanelRows);  // length known to the compiler
      } else {
        store_rows(begin, end);
      }
    }
  }
}

// Prefetch distances: bytes of a panel when one tile takes all rows of x, and when several do (at
// least a block's bytes of a panel); 64-byte lines of row scales.
constexpr int kAheadOfFew = 2048, kAheadOfMany = 8192, kScalesAhead = 8;

// Prefetches weights or their scales into the level-2 cache: the few line fill buffers of level 1
// stay free for what is read now, and more requests are in flight. With high memory latency this
// gains up to a third.
[[maybe_unused]] void fetch_weights(const void* from) { __builtin_prefetch(from, 0, 2); }

// Fetches what b.ahead points to while some panels are multiplied: their share of the lines of each
// panel of the group, a line of each panel in turn. The hardware prefetcher continues four streams,
// but not one that stops after every block. A panel by itself is fetched in quarters.
class LinesAhead {
 public:
  LinesAhead(const Block& b, int panel, int n_lines) {
    const bool whole = b.n_panels == kGroup;
    const int64_t quarter_bytes = int64_t{n_lines + kGroup - 1} / kGroup * kStepBytes;
    for (int p = 0; p < kGroup; ++p)
      ahead_[p] = whole ? b.ahead[p] + panel * quarter_bytes : b.ahead[panel] + p * quarter_bytes;
  }
  [[gnu::always_inline]] void fetch() {
    fetch_weights(ahead_[n_ % kGroup] + n_ / kGroup * kStepBytes);
    ++n_;
  }

 private:
  const char* ahead_[kGroup];
  uint64_t n_ = 0;
};

void fetch_weights(const void* from, int n_bytes) {
  for (int i = 0; i < n_bytes; i += 64) fetch_weights(bytes(from) + i);
}

struct PanelPlace {
  const Weight* w;
  int64_t panel;
  const char* data() const { return bytes(w->data) + panel * w->stride; }
};

// The panel read after this one: of the next group, of the next product, or again the last panel.
PanelPlace panel_after(const GemmArgs& a, const PanelRange& range, int panel) {
  if (panel + kGroup < range.n || !a.next)
    return {&a.w, range.first + min(panel + kGroup, range.n - 1)};
  return {a.next, a.next_row / kPanelRows + panel % kGroup};
}

// Iterates over the scales of a panel by column block.
class PanelScales {
 public:
  PanelScales() = default;
  PanelScales(const Weight& w, int64_t panel) {
    if (!w.scales) return;
    if (w.type == WeightType::kI4) {
      kind_ = Kind::kGroups;
      groups_ = reinterpret_cast<const bf16*>(w.scales + panel / kScalePanels * w.scale_stride) +
                panel % kScalePanels * kPanelRows;
      begins_line_ = panel % 2 == 0;
      return;
    }
    if (w.type == WeightType::kI4TwoLevel) {
      kind_ = Kind::kRows;
      rows_[0] = two_level_scales(w, panel);
      return;
    }
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

  // Reads the scales of 16 rows in a column block.
  void read(int block, float* scale) const {
    switch (kind_) {
      case Kind::kNone:
        return fill(scale, 1);
      case Kind::kOne:
        return fill(scale, rows_[0][block]);
      case Kind::kRows:
        __builtin_memcpy(scale, rows_[0] + block * kPanelRows, kPanelRows * sizeof(float));
        return;
      case Kind::kGroups: {
        const bf16* const group = groups_ + block * kScalePanels * kPanelRows;
        uint32_t bits[kPanelRows];
        for (int r = 0; r < kPanelRows; ++r) bits[r] = uint32_t{group[r]} << 16;
        __builtin_memcpy(scale, bits, sizeof(bits));
        return;
      }
      case Kind::kSeveral:
        for (int r = 0; r < kPanelRows; ++r) scale[r] = rows_[r][block];
    }
  }
  // Prefetches the scales of the first blocks.
  void prefetch_first() const {
    if (kind_ == Kind::kGroups)
      return fetch_weights(groups_, kMaxParts * kScalePanels * kPanelRows * sizeof(bf16));
    if (kind_ != Kind::kNone) fetch_weights(rows_[0], kScalesAhead * 64);
  }
  // Returns n blocks' scales as kI4 stores them and prefetches as many, of the next block of
  // columns or later ones. Two panels' scales are one line, which the first of them fetches.
  const bf16* stored(int block, int n) const {
    const bf16* const from = groups_ + block * kScalePanels * kPanelRows;
    const int ahead = n > kScalesAhead ? n : kScalesAhead;
    for (int i = 0; i < n && begins_line_; ++i)
      fetch_weights(from + (ahead + i) * kScalePanels * kPanelRows);
    return from;
  }
  // Returns [n][16] scales, in place or in `room`, and prefetches later ones.
  const float* read(int block, int n, float (*room)[kPanelRows]) const {
    if (kind_ == Kind::kRows) {
      const float* const scale = rows_[0] + block * kPanelRows;
      for (int i = 0; i < n; ++i) fetch_weights(scale + (i + kScalesAhead) * kPanelRows);
      return scale;
    }
    if (kind_ == Kind::kGroups) stored(block, n);  // prefetches
    for (int i = 0; i < n; ++i) read(block + i, room[i]);
    return room[0];
  }

 private:
  const float* rows_[kPanelRows];
  const bf16* groups_ = nullptr;
  enum class Kind { kNone, kOne, kRows, kGroups, kSeveral } kind_ = Kind::kNone;
  bool begins_line_ = false;  // whether groups_ is the beginning of a cache line
};

// Divides the columns of a matrix, left to right, where scales change.
class ScaleColumns {
 public:
  explicit ScaleColumns(const Weight& w) {
    if (!w.scales || w.type == WeightType::kI4TwoLevel) return;
    width_ = w.block_cols;
    next_ = w.col0 / width_;
    left_ = width_ - w.col0 % width_;
  }
  // Takes at most n columns that share the scales of block(); returns their number.
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
  // Takes as many as possible of the next n columns in parts as wide as the last one, if each part
  // has a block of scales of its own, or there are none; returns the number of columns.
  int take_parts(int part, int n) {
    if (n < part || (width_ > 0 && (part != width_ || left_ != width_))) return 0;
    const int n_parts = min(n / part, kMaxParts - 1);
    next_ += n_parts;
    return n_parts * part;
  }
  int block() const { return block_; }

 private:
  int width_ = 0, block_ = 0, next_ = 0, left_ = 0;
};

// Summation order: at most `part` columns form one unscaled sum. Tiles take one part, or several of
// up to `block` columns in total. Weights are prefetched `ahead` bytes before they are read. Sums
// are in units of `unit`. If `stored`, tiles read the scales of kI4 as they are stored.
struct Order {
  int part, block = 0, ahead = kAheadOfMany;
  float unit = 1;
  bool stored = false;
};

// The loops of every product: groups of panels, chunks of rows of x, blocks of columns.
// add_block(block, first, m, sums) adds the block to the sums of rows [first, first + m).
template <class AddBlock>
void multiply(const GemmArgs& a, const Order& order, AddBlock add_block) {
  alignas(64) Sum sums[kChunk];
  alignas(64) float scale_room[kGroup][kMaxParts][kPanelRows];
  const PanelRange range = panels_of(a);
  const int step_shift = __builtin_ctz(columns_of_step(a.w.type));
  const int64_t panel_end = panel_bytes(a.w.type, a.k);
  const bool two_level = a.w.type == WeightType::kI4TwoLevel;
  for (int panel = 0; panel < range.n; panel += kGroup) {
    const int n_panels = min(kGroup, range.n - panel);
    Block b;
    b.n_panels = n_panels;
    b.group = a.w.block_cols;
    const char* base[kGroup];
    PanelPlace after[kGroup];
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
        b.part = columns.take(min(order.part, a.k - b.col));
        const int scale_block = columns.block();
        b.n = b.part + columns.take_parts(b.part, min(order.block, a.k - b.col) - b.part);
        const int64_t offset = int64_t{b.col >> step_shift} * kStepBytes;
        const bool last = b.col + b.n >= a.k;
        const int64_t ahead = offset + order.ahead;
        for (int p = 0; p < n_panels; ++p) {
          b.w[p] = base[p] + offset;
          b.ahead[p] = ahead < panel_end ? base[p] + ahead : after[p].data() + (ahead - panel_end);
          if (order.stored) {
            b.stored[p] = scales[p].stored(scale_block, b.n / b.part);
          } else {
            b.scale[p] = scales[p].read(scale_block, b.n / b.part, scale_room[p]);
          }
          if (last) {
            fetch_weights(after[p].data(), kAheadOfFew);
            PanelScales(*after[p].w, after[p].panel).prefetch_first();
            if (a.x.type == ActivationType::kU8)
              fetch_weights(sums_of_rows(a.w, range.first + panel + p));
          }
          if (two_level) {
            const int64_t group = b.col / b.group;
            b.multipliers[p] =
                two_level_multipliers(a.w, range.first + panel + p) + group * kMultipliers;
          }
        }
        if (two_level) {
          const int8_t* const then = last
                                         ? two_level_multipliers(*after[0].w, after[0].panel)
                                         : b.multipliers[0] + int64_t{b.n / b.group} * kMultipliers;
          fetch_weights(then, min(order.part, a.k) / b.group * kMultipliers);
        }
        add_block(b, first, m, sums);
      }
      store(sums, order.unit, a, range, first, m, panel, n_panels);
    }
  }
}

}  // namespace
}  // namespace tandem::cpu
