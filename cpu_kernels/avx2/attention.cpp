// Attention of up to 128 queries at a time over blocks of keys, in float (docs/cpu_attention.md).
// Lanes are queries: both products multiply vectors of 16 queries, a panel, by broadcasts, which
// are numbers of keys or values.
#include "cpu_kernels/avx2/tiles.h"
#include "cpu_kernels/key_blocks.h"

namespace tandem::cpu {
namespace {

constexpr int kPanelQueries = 16, kPanels = 8, kQueries = kPanels * kPanelQueries;
constexpr int kStrip = 16;                           // columns of keys or values that lie together
constexpr int kMaxStrips = kMaxKeyDim / kStrip + 1;  // both parts are padded to whole strips
constexpr int kStripsTogether = 8;  // strips whose products are summed in registers
constexpr int kTileKeys = 6;        // keys of a tile of scores

// A number of each query of a panel.
struct alignas(64) Lanes {
  float of[kPanelQueries];
};
// Some columns of keys or values as float.
using Strip = float[kSlots][kStrip];

struct Scratch {
  Lanes queries[kPanels][kMaxStrips * kStrip];  // [column]
  alignas(64) Strip keys[kMaxStrips];
  alignas(64) Strip values;        // where they are not columns of the keys
  Lanes weights[kPanels][kSlots];  // scores, then exp(score - max)
  Lanes out[kPanels][kMaxValueDim];
  Lanes max[kPanels], sum[kPanels];
  alignas(64) int token[kQueries];  // a query sees visible + token keys of a block
};

int strips_of(int dim) { return (dim + kStrip - 1) / kStrip; }

int n_panels_of(int n_queries) { return (n_queries + kPanelQueries - 1) / kPanelQueries; }

// Vectors of a panel that hold queries.
int vectors_of(int n_queries, int panel) {
  return n_queries - panel * kPanelQueries > kLanes ? 2 : 1;
}

// Transposes `dim` columns of up to 16 rows into lanes, padded with zeros to whole strips.
void to_lanes(const float* rows, int64_t stride, int n_rows, int dim, Lanes* to) {
  for (int c = 0; c < strips_of(dim) * kStrip; c += kLanes)
    for (int half = 0; half < kPanelQueries; half += kLanes) {
      __m256i r[8] = {};
      for (int i = 0; i < kLanes && half + i < n_rows; ++i)
        r[i] = _mm256_castps_si256(load_floats(rows + (half + i) * stride + c, dim - c));
      transpose(r);
      for (int i = 0; i < kLanes; ++i)
        _mm256_store_si256(reinterpret_cast<__m256i*>(to[c + i].of + half), r[i]);
    }
}

void from_lanes(const Lanes* from, int n_rows, int dim, float* rows, int64_t stride) {
  for (int c = 0; c < dim; c += kLanes)
    for (int half = 0; half < n_rows; half += kLanes) {
      __m256i r[8];
      for (int i = 0; i < kLanes; ++i)
        r[i] = _mm256_load_si256(reinterpret_cast<const __m256i*>(from[c + i].of + half));
      transpose(r);
      for (int i = 0; i < kLanes && half + i < n_rows; ++i)
        store_floats(rows + (half + i) * stride + c, dim - c, _mm256_castsi256_ps(r[i]));
    }
}

// Widens columns [column, column + 16) of the rows of all blocks; missing rows and columns are
// zero. rows(block) is the address of the first row's first column.
template <class Load, class Rows>
void widen_strip(const Blocks& b, Rows rows, int64_t stride, int dim, int column, Strip& to) {
  const int n = min(kStrip, dim - column);
  for (int i = 0; i < b.n; ++i) {
    const char* from = rows(b.blocks[i]) + column * Load::kBytes;
    float(*row)[kStrip] = to + i * kMaxKeys;
    const int n_keys = b.blocks[i].n_keys;
    for (int key = 0; key < n_keys; ++key, ++row, from += stride) {
      const char* columns = from;
      alignas(32) char tail[kStrip * Load::kBytes] = {};
      if (n < kStrip) {
        __builtin_memcpy(tail, from, n * Load::kBytes);
        columns = tail;
      }
      _mm256_store_ps(*row, Load::load(columns));
      _mm256_store_ps(*row + kLanes, Load::load(columns + kLanes * Load::kBytes));
    }
    __builtin_memset(row, 0, (kMaxKeys - n_keys) * sizeof(*row));
  }
}

template <class Load>
void widen_keys(const AttendArgs& a, const Blocks& b, Scratch& s) {
  Strip* to = s.keys;
  for (int c = 0; c < a.dim; c += kStrip)
    widen_strip<Load>(
        b, [](const KeyBlock& k) { return bytes(k.k); }, a.k_stride, a.dim, c, *to++);
  for (int c = 0; c < a.rope_dim; c += kStrip)
    widen_strip<Load>(
        b, [](const KeyBlock& k) { return bytes(k.k_rope); }, a.k_rope_stride, a.rope_dim, c,
        *to++);
}

// Adds products of kVectors vectors of queries with M numbers of each of n steps to sums.
template <int M, int kVectors>
[[gnu::always_inline]] inline void add_products(const Lanes* w, const float* x, int64_t x_step,
                                                int64_t x_row, int n, __m256 (&sums)[M][2]) {
  for (int step = 0; step < n; ++step, x += x_step, ++w) {
    const __m256 low = _mm256_load_ps(w->of);
    const __m256 high = kVectors == 2 ? _mm256_load_ps(w->of + kLanes) : low;
    each<M>([&](auto i) __attribute__((always_inline)) {
      const __m256 xs = _mm256_broadcast_ss(x + i * x_row);
      multiply_add(sums[i][0], xs, low);
      if constexpr (kVectors == 2) multiply_add(sums[i][1], xs, high);
    });
  }
}

template <int M>
[[gnu::always_inline]] inline void clear(__m256 (&sums)[M][2]) {
  each<M>([&](auto i)
              __attribute__((always_inline)) { sums[i][0] = sums[i][1] = _mm256_setzero_ps(); });
}

// The scores of a panel for M slots from `slot` on, over strips [first, end).
template <int M, int kVectors>
void score_tile(const Scratch& s, int panel, int slot, int first, int end, Lanes* scores) {
  __m256 sums[M][2];
  clear(sums);
  for (int strip = first; strip < end; ++strip)
    add_products<M, kVectors>(s.queries[panel] + strip * kStrip, s.keys[strip][slot], 1, kStrip,
                              kStrip, sums);
  each<M>([&](auto i) __attribute__((always_inline)) {
    each<kVectors>([&](auto v) __attribute__((always_inline)) {
      float* const to = scores[slot + i].of + v * kLanes;
      const __m256 before = first == 0 ? _mm256_setzero_ps() : _mm256_load_ps(to);
      _mm256_store_ps(to, _mm256_add_ps(before, sums[i][v]));
    });
  });
}

// out = out * shrink + weights . values of a panel, for M columns of a strip.
template <int M, int kVectors>
void value_tile(const Lanes* weights, const Strip& values, int column, int n_slots,
                const Lanes& shrink, Lanes* out) {
  __m256 sums[M][2];
  clear(sums);
  add_products<M, kVectors>(weights, values[0] + column, kStrip, 1, n_slots, sums);
  each<M>([&](auto i) __attribute__((always_inline)) {
    each<kVectors>([&](auto v) __attribute__((always_inline)) {
      float* const to = out[i].of + v * kLanes;
      const __m256 factor = _mm256_load_ps(shrink.of + v * kLanes);
      _mm256_store_ps(to, _mm256_fmadd_ps(_mm256_load_ps(to), factor, sums[i][v]));
    });
  });
}

// Where to prefetch the keys of the next blocks, and how many bytes with each tile: one burst would
// delay the product's own loads.
class Ahead {
 public:
  Ahead(const AttendArgs& a, const Blocks& b, int n_tiles) {
    for (int i = 0; b.next && i < b.n; ++i) {
      at_[i] = bytes(b.next[i].k);
      left_[i] = b.next[i].n_keys * a.k_stride;
      per_tile_ += left_[i];
    }
    per_tile_ = (per_tile_ / n_tiles + 63) / 64 * 64;
  }
  void fetch() {
    for (int64_t n = per_tile_; n > 0 && block_ < kBlocks; n -= 64) {
      if (left_[block_] <= 0) {
        ++block_;
        continue;
      }
      fetch_weights(at_[block_]);
      at_[block_] += 64;
      left_[block_] -= 64;
    }
  }

 private:
  const char* at_[kBlocks] = {};
  int64_t left_[kBlocks] = {}, per_tile_ = 0;
  int block_ = 0;
};

using ScoreTile = void (*)(const Scratch&, int, int, int, int, Lanes*);
template <int kVectors>
constexpr ScoreTile kScoreTiles[kTileKeys] = {score_tile<1, kVectors>, score_tile<2, kVectors>,
                                              score_tile<3, kVectors>, score_tile<4, kVectors>,
                                              score_tile<5, kVectors>, score_tile<6, kVectors>};

// The scores of all panels; of panel p the first n_slots[p] slots.
void score(const AttendArgs& a, const Blocks& b, const int* n_slots, Scratch& s) {
  const int n_strips = strips_of(a.dim) + strips_of(a.rope_dim);
  const int n_panels = n_panels_of(b.n_queries);
  const int n_chunks = (n_strips + kStripsTogether - 1) / kStripsTogether;
  Ahead ahead(a, b, n_chunks * n_panels * (kSlots / kTileKeys));
  for (int first = 0; first < n_strips; first += kStripsTogether) {
    const int end = min(n_strips, first + kStripsTogether);
    for (int p = 0; p < n_panels; ++p) {
      const auto& tiles = vectors_of(b.n_queries, p) == 2 ? kScoreTiles<2> : kScoreTiles<1>;
      for (int slot = 0, n; slot < n_slots[p]; slot += n) {
        n = min(kTileKeys, n_slots[p] - slot);
        tiles[n - 1](s, p, slot, first, end, s.weights[p]);
        ahead.fetch();
      }
    }
  }
}

// Turns the scores of eight queries, half of a panel, into weights, and updates maxima and sums.
// Writes the factors that rescale previous outputs.
void apply_softmax(const AttendArgs& a, const Blocks& b, int panel, int half, int n_slots,
                   Scratch& s, Lanes& shrink) {
  const int first = panel * kPanelQueries + half;
  const __m256i token = _mm256_load_si256(reinterpret_cast<const __m256i*>(s.token + first));
  const __m256 scale = _mm256_set1_ps(a.scale), nothing = _mm256_set1_ps(-__builtin_inff());
  // Calls use(weight, seen) for each slot; `seen` is all ones for queries that see its key.
  const auto for_slots = [&](auto use) __attribute__((always_inline)) {
    for (int i = 0; i < b.n; ++i) {
      const KeyBlock& block = b.blocks[i];
      const __m256i seen =
          _mm256_min_epi32(_mm256_add_epi32(token, _mm256_set1_epi32(block.visible)),
                           _mm256_set1_epi32(block.n_keys));
      for (int slot = i * kMaxKeys; slot < min(n_slots, (i + 1) * kMaxKeys); ++slot)
        use(s.weights[panel][slot].of + half,
            _mm256_castsi256_ps(_mm256_cmpgt_epi32(seen, _mm256_set1_epi32(slot - i * kMaxKeys))));
    }
  };
  __m256 found = nothing;
  for_slots([&](float* at, __m256 seen) __attribute__((always_inline)) {
    const __m256 scaled = _mm256_mul_ps(_mm256_load_ps(at), scale);
    found = _mm256_max_ps(found, _mm256_blendv_ps(nothing, scaled, seen));
  });
  float* const max_at = s.max[panel].of + half;
  float* const sum_at = s.sum[panel].of + half;
  const __m256 before = _mm256_load_ps(max_at), max = _mm256_max_ps(before, found);
  __m256 total = _mm256_setzero_ps();
  for_slots([&](float* at, __m256 seen) __attribute__((always_inline)) {
    const __m256 weight = _mm256_and_ps(exp(_mm256_fmsub_ps(_mm256_load_ps(at), scale, max)), seen);
    _mm256_store_ps(at, weight);
    total = _mm256_add_ps(total, weight);
  });
  // A query that has seen no key has sums of 0; exp() is finite for any argument.
  const __m256 factor = exp(_mm256_sub_ps(before, max));
  _mm256_store_ps(shrink.of + half, factor);
  _mm256_store_ps(sum_at, _mm256_fmadd_ps(_mm256_load_ps(sum_at), factor, total));
  _mm256_store_ps(max_at, max);
}

// Adds a strip of values to the outputs of a panel: 16 columns in tiles of 6, 5 and 5.
template <int kVectors>
void blend_strip(const Lanes* weights, const Strip& values, int n_slots, const Lanes& shrink,
                 Lanes* out) {
  value_tile<6, kVectors>(weights, values, 0, n_slots, shrink, out);
  value_tile<5, kVectors>(weights, values, 6, n_slots, shrink, out + 6);
  value_tile<5, kVectors>(weights, values, 11, n_slots, shrink, out + 11);
}

template <class Load>
void attend_blocks(const AttendArgs& a, const Blocks& b, Scratch& s) {
  const int n_panels = n_panels_of(b.n_queries);
  int n_slots[kPanels], most = 0;
  for (int p = 0; p < n_panels; ++p) {
    n_slots[p] = slots_seen(b, s.token[min(b.n_queries, (p + 1) * kPanelQueries) - 1]);
    most = n_slots[p] > most ? n_slots[p] : most;
  }
  if (most == 0) return;
  widen_keys<Load>(a, b, s);
  score(a, b, n_slots, s);
  Lanes shrink[kPanels];
  for (int p = 0; p < n_panels; ++p)
    for (int v = 0; v < vectors_of(b.n_queries, p); ++v)
      apply_softmax(a, b, p, v * kLanes, n_slots[p], s, shrink[p]);
  // In the absorbed form values are a prefix of the keys.
  bool same = a.v_dim <= a.dim;
  for (int i = 0; i < b.n; ++i) same = same && b.blocks[i].v == b.blocks[i].k;
  for (int c = 0; c < a.v_dim; c += kStrip) {
    if (!same)
      widen_strip<Load>(
          b, [](const KeyBlock& k) { return bytes(k.v); }, a.v_stride, a.v_dim, c, s.values);
    const Strip& values = same ? s.keys[c / kStrip] : s.values;
    for (int p = 0; p < n_panels; ++p) {
      const auto blend = vectors_of(b.n_queries, p) == 2 ? blend_strip<2> : blend_strip<1>;
      if (n_slots[p] > 0) blend(s.weights[p], values, n_slots[p], shrink[p], s.out[p] + c);
    }
  }
}

template <class Load>
void attend(const AttendArgs& a) {
  Scratch s;
  for (int first = 0; first < a.n_queries; first += kQueries) {
    const int n = min(kQueries, a.n_queries - first);
    const int rope = strips_of(a.dim) * kStrip;
    for (int p = 0; p * kPanelQueries < n; ++p) {
      const int query = first + p * kPanelQueries, rows = min(kPanelQueries, first + n - query);
      to_lanes(a.q + query * a.q_stride, a.q_stride, rows, a.dim, s.queries[p]);
      to_lanes(a.q_rope + query * a.q_rope_stride, a.q_rope_stride, rows, a.rope_dim,
               s.queries[p] + rope);
      to_lanes(a.out + query * a.out_stride, a.out_stride, rows, a.v_dim, s.out[p]);
      for (int i = 0; i < kPanelQueries; ++i) {
        const int of = query + min(i, rows - 1);
        s.token[p * kPanelQueries + i] = (a.first_query + of) / a.queries_per_token;
        s.max[p].of[i] = a.max[of];
        s.sum[p].of[i] = a.sum[of];
      }
    }
    for (int i = 0; i < a.n_blocks; i += kBlocks) attend_blocks<Load>(a, blocks_at(a, i, n), s);
    for (int p = 0; p * kPanelQueries < n; ++p) {
      const int query = first + p * kPanelQueries, rows = min(kPanelQueries, first + n - query);
      from_lanes(s.out[p], rows, a.v_dim, a.out + query * a.out_stride, a.out_stride);
      __builtin_memcpy(a.max + query, s.max[p].of, rows * sizeof(float));
      __builtin_memcpy(a.sum + query, s.sum[p].of, rows * sizeof(float));
    }
  }
}

}  // namespace

void avx2_attend(const AttendArgs& a) {
  a.type == ActivationType::kBF16 ? attend<LoadBf16>(a) : attend<LoadF32>(a);
}

void install_avx2_attention(KernelTable& t) { t.attend = avx2_attend; }

}  // namespace tandem::cpu
