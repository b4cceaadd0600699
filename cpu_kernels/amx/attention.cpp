// The two products of attention with TDPBF16PS, 32 rows by 32 columns at a time. A tiles are read
// from the cache's keys and from rows of weights, B tiles from packed queries and values.
// docs/measurements/amx_counts.md counts the loops' instructions.
#include "cpu_kernels/avx512/attention.h"

#include "cpu_kernels/amx/config.h"

namespace tandem::cpu {

void avx512_attend(const AttendArgs&);

namespace {

constexpr int kTileColumns = 32;  // BF16 columns of a tile
static_assert(kTileColumns == kTileKeys && kTileColumns == 2 * kTileRows);

// Rows for two A tiles: 32 columns every 64 bytes.
struct Rows {
  const char* data;
  int64_t stride;
};

// Tiles 0 to 3 += rows . w over n_tiles times 32 columns. w is packed, with kPanels panels. Smaller
// products use fewer tiles.
template <int kRowTiles, int kPanels>
void multiply(Rows rows, const PanelSteps* w, int n_tiles, Ahead ahead) {
  for (int t = 0; t < n_tiles; ++t, rows.data += kStepBytes, w += kTileRows) {
    _tile_loadd(4, rows.data, rows.stride);
    _tile_loadd(6, w[0][0], sizeof(PanelSteps));
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kPanels == 2) {
      _tile_loadd(7, w[0][1], sizeof(PanelSteps));
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kRowTiles == 2) {
      _tile_loadd(5, rows.data + kTileRows * rows.stride, rows.stride);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (kPanels == 2) _tile_dpbf16ps(3, 5, 7);
    }
    for (int i = 0; i < ahead.per_step; i += kStepBytes)
      _mm_prefetch(ahead.at + t * ahead.per_step + i, _MM_HINT_T1);
  }
}

// Stores tiles 0 to 3 as [row][column of both panels].
template <int kRowTiles, int kPanels>
void store_tiles(float* out, int64_t stride) {
  const auto bytes_apart = stride * static_cast<int64_t>(sizeof(float));
  _tile_stored(0, out, bytes_apart);
  if constexpr (kPanels == 2) _tile_stored(1, out + kTileRows, bytes_apart);
  if constexpr (kRowTiles == 2) {
    _tile_stored(2, out + kTileRows * stride, bytes_apart);
    if constexpr (kPanels == 2) _tile_stored(3, out + kTileRows * (stride + 1), bytes_apart);
  }
}

// A zero-padded copy of the last keys of a block, for tiles that would read past its end.
struct LastKeys {
  alignas(64) char k[kTileKeys][kMaxKeyDim * sizeof(bf16)] = {};
  alignas(64) char k_rope[kTileKeys][kMaxKeyDim * sizeof(bf16)] = {};

  LastKeys(const AttendArgs& a, const KeyBlock& block, int first) {
    for (int i = 0; first + i < block.n_keys; ++i) {
      __builtin_memcpy(k[i], bytes(block.k) + (first + i) * a.k_stride, a.dim * sizeof(bf16));
      __builtin_memcpy(k_rope[i], bytes(block.k_rope) + (first + i) * a.k_rope_stride,
                       a.rope_dim * sizeof(bf16));
    }
  }
};

// Scores of 32 keys and the queries of kPanels panels.
template <int kPanels>
void score_tiles(const AttendArgs& a, Rows k, Rows k_rope, const char (*queries)[kStepBytes],
                 Ahead ahead, float* out) {
  const auto* const q = reinterpret_cast<const PanelSteps*>(queries);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  multiply<2, kPanels>(k, q, a.dim / kTileColumns, ahead);
  multiply<2, kPanels>(k_rope, q + rope_step(a), a.rope_dim / kTileColumns, {nullptr, 0});
  store_tiles<2, kPanels>(out, kTogether);
}

// out += weights . values for kRowTiles times 16 queries and 32 columns.
template <int kRowTiles>
void blend_tiles(Rows weights, const char (*values)[kStepBytes], int n_tiles, float* out) {
  constexpr auto kBytesApart = static_cast<int64_t>(kOutStride * sizeof(float));
  _tile_loadd(0, out, kBytesApart);
  _tile_loadd(1, out + kTileRows, kBytesApart);
  if constexpr (kRowTiles == 2) {
    _tile_loadd(2, out + kTileRows * kOutStride, kBytesApart);
    _tile_loadd(3, out + kTileRows * (kOutStride + 1), kBytesApart);
  }
  multiply<kRowTiles, 2>(weights, reinterpret_cast<const PanelSteps*>(values), n_tiles,
                         {nullptr, 0});
  store_tiles<kRowTiles, 2>(out, kOutStride);
}

// The key at the same position in the next blocks. Without next blocks it is the key itself, which
// costs nothing to prefetch.
const char* next_key(const AttendArgs& a, const Blocks& b, int i, int key) {
  return bytes((b.next ? b.next : b.blocks)[i].k) + key * a.k_stride;
}

struct TileProducts {
  static void score(const AttendArgs& a, const Blocks& b, int panel, Scratch& s) {
    const int n_panels = min(kPanelsTogether, (b.n_queries + kPanelRows - 1) / kPanelRows - panel);
    const int last = min(b.n_queries, (panel + n_panels) * kPanelRows) - 1;
    for (int i = 0; i < b.n; ++i) {
      const int seen = keys_seen(b.blocks[i], s.token[last]);
      for (int key = 0; key < seen; key += kTileKeys) score(a, b, i, key, panel, n_panels, s);
    }
  }

  static void score(const AttendArgs& a, const Blocks& b, int i, int key, int panel, int n_panels,
                    Scratch& s) {
    const KeyBlock& block = b.blocks[i];
    if (key + kTileKeys > block.n_keys) {
      const LastKeys keys(a, block, key);
      return score(a, {keys.k[0], sizeof(keys.k[0])}, {keys.k_rope[0], sizeof(keys.k_rope[0])},
                   {nullptr, 0}, i * kMaxKeys + key, panel, n_panels, s);
    }
    // Each group of four query panels fetches an equal part of the next keys.
    const int64_t n_parts = (b.n_queries + kTogether - 1) / kTogether;
    const int64_t fetched = kTileKeys * a.k_stride / n_parts;
    const Ahead ahead = {next_key(a, b, i, key) + panel / kPanelsTogether * fetched, fetched};
    score(a, {bytes(block.k) + key * a.k_stride, a.k_stride},
          {bytes(block.k_rope) + key * a.k_rope_stride, a.k_rope_stride}, ahead, i * kMaxKeys + key,
          panel, n_panels, s);
  }

  static void score(const AttendArgs& a, Rows k, Rows k_rope, Ahead ahead, int slot, int panel,
                    int n_panels, Scratch& s) {
    const int n_tiles = a.dim / kTileColumns, n_pairs = (n_panels + 1) / 2;
    const PanelSteps* const q = s.queries[panel / kPanelsTogether];
    ahead.per_step = ahead.per_step / (n_pairs * n_tiles);
    order_memory();
    for (int p = 0; p < n_panels; p += 2, ahead.at += ahead.per_step * n_tiles) {
      const auto tiles = n_panels - p == 1 ? score_tiles<1> : score_tiles<2>;
      tiles(a, k, k_rope, *q + p, ahead, s.scores[slot] + p * kPanelRows);
    }
    order_memory();
  }

  static void blend(const AttendArgs& a, const Blocks& b, int column, Scratch& s) {
    order_memory();
    for (int p = 0; p < kPanelsTogether && column + p * kPanelRows < a.v_dim; p += 2)
      for (int query = 0; query < b.n_queries; query += 2 * kTileRows) {
        const int slots = slots_seen(b, s.token[query + 2 * kTileRows - 1]);
        const auto tiles = b.n_queries - query <= kTileRows ? blend_tiles<1> : blend_tiles<2>;
        tiles({bytes(s.weights[query]), sizeof(s.weights[0])}, s.values[0] + p,
              (slots + kTileKeys - 1) / kTileKeys, s.out[query] + column + p * kPanelRows);
      }
    order_memory();
  }
};

// Tiles need multiples of 32 columns, which all known checkpoints have; others use vectors.
void attend(const AttendArgs& a) {
  if (a.type == ActivationType::kF32 || a.dim % kTileColumns != 0 || a.rope_dim % kTileColumns != 0)
    return avx512_attend(a);
  configure_tiles();
  attend_with<TileProducts>(a);
  _tile_release();
}

}  // namespace

void install_amx_attention(KernelTable& t) { t.attend = attend; }

}  // namespace tandem::cpu
