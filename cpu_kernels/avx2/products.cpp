// Products of float activations over panels with AVX2, FMA and F16C. Weights are widened to float
// in registers; from the fifth row of x on, FP8 and F16 are also kept as float in the level-1
// cache.
#include "cpu_kernels/avx2/tiles.h"
#include "cpu_kernels/panels.h"

namespace tandem::cpu {
namespace {

constexpr int kColumns = 128;                      // of a part; 32 KiB of float in a group
constexpr int kWideBytes = kColumns * kStepBytes;  // per panel, in steps of one column
constexpr int kSpare = 4 * kStepBytes;  // a step that is widened once more behind the last panel

// Sixteen rows of one column.
struct Column {
  __m256 low, high;
};

__m256i load_bytes(const char* from, int64_t n) {
  if (n >= 32) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  alignas(32) char tail[32] = {};
  if (n > 0) __builtin_memcpy(tail, from, n);
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(tail));
}

// Reorders the words in each 16 bytes of an FP8 step.
__m256i exchange_words(__m256i step) {
  const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  return _mm256_shuffle_epi8(step, _mm256_broadcastsi128_si256(order));
}

void pack(const PackArgs& a) {
  const int64_t row_size = row_bytes(a.type, a.cols);
  const int64_t stride = panel_bytes(a.type, a.cols);
  for (int64_t r = 0; r < a.n_rows; r += kPanelRows) {
    char* to = static_cast<char*>(a.to) + (a.first_row + r) / kPanelRows * stride;
    const int64_t n_rows = a.n_rows - r;
    for (int64_t b = 0; b < stride / kPanelRows; b += 32) {
      for (int half = 0; half < 2; ++half) {
        __m256i steps[8] = {};
        for (int i = 0; i < 8 && half * 8 + i < n_rows; ++i)
          steps[i] = load_bytes(bytes(a.from) + (r + half * 8 + i) * row_size + b, row_size - b);
        transpose(steps);
        for (int i = 0; i < 8; ++i) {
          if (a.type == WeightType::kF8E4M3) steps[i] = exchange_words(steps[i]);
          char* const step = to + b * kPanelRows + i * kStepBytes + half * 32;
          _mm256_stream_si256(reinterpret_cast<__m256i*>(step), steps[i]);
        }
      }
    }
  }
  _mm_sfence();
}

// The types of weights. widen() calls use(Index<column>, low, high) for each column of a step of 64
// bytes: 16 rows.
struct F32 {
  static constexpr int kColumns = 1;
  static constexpr float kLift = 1, kUnit = 1;
  template <class Use>
  [[gnu::always_inline]] static void widen(const char* from, Use use) {
    use(Index<0>{}, _mm256_castsi256_ps(load(from)), _mm256_castsi256_ps(load(from + 32)));
  }
};

struct Bf16 {
  static constexpr int kColumns = 2;
  static constexpr float kLift = 1, kUnit = 1;
  static __m256 first(__m256i v) { return _mm256_castsi256_ps(_mm256_slli_epi32(v, 16)); }
  static __m256 second(__m256i v) {
    return _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32(-65536)));
  }
  template <class Use>
  [[gnu::always_inline]] static void widen(const char* from, Use use) {
    const __m256i low = load(from), high = load(from + 32);
    use(Index<0>{}, first(low), first(high));
    use(Index<1>{}, second(low), second(high));
  }
};

__m256 low_halves(__m256i v) { return _mm256_cvtph_ps(_mm256_castsi256_si128(v)); }
__m256 high_halves(__m256i v) { return _mm256_cvtph_ps(_mm256_extracti128_si256(v, 1)); }

struct F16 {
  static constexpr int kColumns = 2;
  static constexpr float kLift = 1, kUnit = 1;
  // Orders eight numbers of the first column before eight of the second.
  static __m256i sort(__m256i v) {
    const __m128i even_odd = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    return _mm256_permute4x64_epi64(_mm256_shuffle_epi8(v, _mm256_broadcastsi128_si256(even_odd)),
                                    0xd8);
  }
  template <class Use>
  [[gnu::always_inline]] static void widen(const char* from, Use use) {
    const __m256i low = sort(load(from)), high = sort(load(from + 32));
    use(Index<0>{}, low_halves(low), low_halves(high));
    use(Index<1>{}, high_halves(low), high_halves(high));
  }
};

// Sign and magnitude of an E4M3 code, shifted into place, form a BF16 number and so a float: 2^-120
// times the value, subnormals included. To avoid subnormal products, x is multiplied by 2^48; the
// unit of the sums makes up for the rest. A product of bytes by 16 is the shift that costs least:
// it extends the sign, takes every other byte, and leaves the pipes of the shuffles free.
struct E4m3 {
  static constexpr int kColumns = 4;
  static constexpr float kLift = 0x1p48f, kUnit = 0x1p72f;
  static __m256i bf16_of(__m256i times, __m256i codes) {
    return _mm256_and_si256(_mm256_maddubs_epi16(times, codes),
                            _mm256_set1_epi16(static_cast<short>(0x87f0)));
  }
  static __m256 low_words(__m256i v) {
    return _mm256_castsi256_ps(_mm256_unpacklo_epi16(_mm256_setzero_si256(), v));
  }
  static __m256 high_words(__m256i v) {
    return _mm256_castsi256_ps(_mm256_unpackhi_epi16(_mm256_setzero_si256(), v));
  }
  template <class Use>
  [[gnu::always_inline]] static void widen(const char* from, Use use) {
    const __m256i even = _mm256_set1_epi16(16), odd = _mm256_set1_epi16(16 << 8);
    const __m256i low = load(from), high = load(from + 32);
    const __m256i even_low = bf16_of(even, low), even_high = bf16_of(even, high);
    use(Index<0>{}, low_words(even_low), low_words(even_high));
    const __m256i odd_low = bf16_of(odd, low), odd_high = bf16_of(odd, high);
    use(Index<1>{}, low_words(odd_low), low_words(odd_high));
    use(Index<2>{}, high_words(even_low), high_words(even_high));
    use(Index<3>{}, high_words(odd_low), high_words(odd_high));
  }
};

template <int N, int M>
void add_sums(const Column (&acc)[N][M], const Block& b, int panel, Sum* sums) {
#pragma GCC unroll 8
  for (int p = 0; p < N; ++p) {
    const float* scale = b.scale[panel + p];
    const __m256 low = _mm256_loadu_ps(scale), high = _mm256_loadu_ps(scale + 8);
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) {
      float* sum = sums[i] + (panel + p) * kPanelRows;
      _mm256_store_ps(sum, _mm256_fmadd_ps(acc[p][i].low, low, _mm256_load_ps(sum)));
      _mm256_store_ps(sum + 8, _mm256_fmadd_ps(acc[p][i].high, high, _mm256_load_ps(sum + 8)));
    }
  }
}

// Adds the products of one column with M rows of x, whose numbers of that column begin `offset`
// bytes behind x[0], .., x[M - 1].
template <int M>
[[gnu::always_inline]] inline void add_products(const char* const* x, int64_t offset, __m256 low,
                                                __m256 high, Column* sums) {
  each<M>([&](auto i) __attribute__((always_inline)) {
    const __m256 xs = _mm256_broadcast_ss(reinterpret_cast<const float*>(x[i] + offset));
    multiply_add(sums[i].low, xs, low);
    multiply_add(sums[i].high, xs, high);
  });
}

// Multiplies M rows of x with N panels. Few rows take several panels at a time so that sums do not
// wait for each other. If kFetch, fetches what is read later. x ends at the same column as the
// weights, but lifted rows are padded with zeros to whole steps.
template <class Type, int M, int N, bool kFetch>
void tile(const char* const* rows, const Block& b, int panel, Sum* sums) {
  Column acc[N][M];
  const char *x[M], *w[N];
  each<M>([&](auto i) __attribute__((always_inline)) { x[i] = rows[i]; });
  each<N>([&](auto p) __attribute__((always_inline)) {
    each<M>([&](auto i) __attribute__((always_inline)) {
      acc[p][i] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    });
    w[p] = b.w[panel + p];
  });
  LinesAhead ahead(b, panel, (b.n + Type::kColumns - 1) / Type::kColumns);
  const int64_t n_bytes = int64_t{4} * b.n;
  for (int64_t at = 0, s = 0; at < n_bytes; at += 4 * Type::kColumns, s += kStepBytes)
    each<N>([&](auto p) __attribute__((always_inline)) {
      if constexpr (kFetch) ahead.fetch();
      Type::widen(
          w[p] + s, [&](auto j, __m256 low, __m256 high) __attribute__((always_inline)) {
            if (Type::kLift == 1 && j > 0 && at + 4 * j >= n_bytes) return;
            add_products<M>(x, at + 4 * j, low, high, acc[p]);
          });
    });
  add_sums(acc, b, panel, sums);
}

// Widens the steps of one panel into b.wide, each one step before its products with M rows of x. If
// kLift, the kept numbers are multiplied by Type::kLift; otherwise x is, and x is padded.
template <class Type, int M, bool kLift>
void widening_tile(const char* const* rows, const Block& b, int panel, Sum* sums) {
  constexpr int kSize = Type::kColumns * kStepBytes;  // of a widened step
  Column acc[1][M];
  const char* x[M];
  each<M>([&](auto i) __attribute__((always_inline)) {
    x[i] = rows[i];
    acc[0][i] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
  });
  // An addition of 0, because multiplications of subnormal numbers are slow.
  const auto lifted = [](__m256 v) __attribute__((always_inline)) {
    return kLift ? _mm256_fmadd_ps(v, _mm256_set1_ps(Type::kLift), _mm256_setzero_ps()) : v;
  };
  const auto keep = [&](const char* step, char* to) __attribute__((always_inline)) {
    Type::widen(
        step, [&](auto j, __m256 low, __m256 high) __attribute__((always_inline)) {
          _mm256_store_ps(reinterpret_cast<float*>(to + j * kStepBytes), lifted(low));
          _mm256_store_ps(reinterpret_cast<float*>(to + j * kStepBytes + 32), lifted(high));
        });
  };
  const char *w = b.w[panel], *ahead = b.ahead[panel];
  char* wide = b.wide + panel * kWideBytes;
  const int64_t n_bytes = int64_t{4} * b.n;
  const int n_steps = (b.n + Type::kColumns - 1) / Type::kColumns;
  const char* const last = w + (n_steps - 1) * kStepBytes;
  keep(w, wide);
  for (int64_t at = 0; w <= last; at += 4 * Type::kColumns, wide += kSize) {
    fetch_weights(ahead);
    ahead += kStepBytes;
    w += kStepBytes;
    keep(w <= last ? w : last, wide + kSize);
    each<Type::kColumns>([&](auto j) __attribute__((always_inline)) {
      if (kLift && j > 0 && at + 4 * j >= n_bytes) return;
      const auto* column = reinterpret_cast<const float*>(wide + j * kStepBytes);
      add_products<M>(x, at + 4 * j, _mm256_load_ps(column), _mm256_load_ps(column + 8), acc[0]);
    });
  }
  add_sums(acc, b, panel, sums);
}

template <class Type, int M, int N, bool kFetch>
void tile_of_group(const char* const* x, const Block& b, int, Sum* sums) {
  for (int p = 0; p < kGroup; p += N) tile<Type, M, N, kFetch>(x, b, p, sums);
}
template <class Type, int M, bool kLift>
void widening_tile_of_group(const char* const* x, const Block& b, int, Sum* sums) {
  for (int p = 0; p < kGroup; ++p) widening_tile<Type, M, kLift>(x, b, p, sums);
}

template <class Type, int M, int N, bool kFetch>
constexpr Tiles kPair = {tile<Type, M, 1, kFetch>, tile_of_group<Type, M, N, kFetch>};
template <class Type, int M, bool kLift>
constexpr Tiles kWidening = {widening_tile<Type, M, kLift>, widening_tile_of_group<Type, M, kLift>};

constexpr int kMaxRows = 6;  // rows of x in a tile
template <class Type, bool kFetch>
constexpr Tiles kTiles[kMaxRows] = {kPair<Type, 1, 4, kFetch>, kPair<Type, 2, 2, kFetch>,
                                    kPair<Type, 3, 1, kFetch>, kPair<Type, 4, 1, kFetch>,
                                    kPair<Type, 5, 1, kFetch>, kPair<Type, 6, 1, kFetch>};
template <class Type>
constexpr Tiles kFewTiles[kMaxRows] = {kPair<Type, 1, 4, true>,   kPair<Type, 2, 2, true>,
                                       kPair<Type, 3, 1, true>,   kPair<Type, 4, 1, true>,
                                       kWidening<Type, 5, false>, kWidening<Type, 6, false>};

// Each tile widens weights for itself: none for F32, four cheap instructions for 32 numbers of
// BF16.
template <class Type, int kPart>
void gemm_in_registers(const GemmArgs& a) {
  multiply(a, {.part = kPart}, [&](const Block& b, int first, int m, Sum* sums) {
    add_rows(a, kTiles<Type, true>, kTiles<Type, false>, b, sizeof(float), first, m, sums);
  });
}

// Copies a block of columns of rows [first, first + m) of x times `factor`, padded with zeros to
// whole steps.
void lift_rows(const GemmArgs& a, const Block& b, int first, int m, float factor,
               float (*to)[kColumns]) {
  const __m256 times = _mm256_set1_ps(factor);
  for (int i = 0; i < m; ++i) {
    const auto* x = reinterpret_cast<const float*>(x_row(a.x, first + i)) + b.col;
    int c = 0;
    for (; c + kLanes <= b.n; c += kLanes)
      _mm256_store_ps(to[i] + c, _mm256_mul_ps(times, _mm256_loadu_ps(x + c)));
    if (c < b.n) _mm256_store_ps(to[i] + c, _mm256_mul_ps(times, load_floats(x + c, b.n - c)));
  }
}

// The first rows of x keep the widened weights for the others. Up to kMaxLifted rows of a chunk are
// lifted, which takes registers from no tile; with more, lifting the kept weights is less work.
template <class Type>
void gemm_keeping(const GemmArgs& a) {
  constexpr int kMaxLifted = 32;
  alignas(64) char room[kGroup * kWideBytes + kSpare];
  alignas(64) float lifted[kMaxLifted][kColumns];
  const Order order = {.part = kColumns, .unit = Type::kUnit};
  multiply(a, order, [&](Block b, int first, int m, Sum* sums) {
    const auto add = [&](const GemmArgs& args, const Tiles& widening, int first_of_args) {
      add_widened_rows<kMaxRows>(args, kFewTiles<Type>, widening, kTiles<F32, false>,
                                 kTiles<F32, false>, b, room, kWideBytes, sizeof(float),
                                 first_of_args, m, sums);
    };
    b.wide = room;
    if (m > kMaxLifted) return add(a, kWidening<Type, kMaxRows, true>, first);
    lift_rows(a, b, first, m, Type::kLift, lifted);
    prefetch_next_rows<kMaxLifted>(a, b, sizeof(float), first + m);
    GemmArgs args = a;
    args.x = {lifted, sizeof(lifted[0]), ActivationType::kF32};
    args.m = m;
    b.col = 0;
    add(args, kWidening<Type, kMaxRows, false>, 0);
  });
}

}  // namespace

void avx2_gemm(const GemmArgs& a) {
  switch (a.w.type) {
    case WeightType::kF32:
      return gemm_in_registers<F32, 256>(a);
    case WeightType::kF16:
      return gemm_keeping<F16>(a);
    case WeightType::kBF16:
      return gemm_in_registers<Bf16, kColumns>(a);
    case WeightType::kF8E4M3:
      return gemm_keeping<E4m3>(a);
    case WeightType::kI8:
    case WeightType::kI4:
    case WeightType::kI4TwoLevel:
      return;  // for byte products only
  }
}

namespace {

// The sum over the lanes of each of 8 vectors.
__m256 sum_lanes(const __m256 (&v)[8]) {
  __m256i t[8];
  for (int i = 0; i < 8; ++i) t[i] = _mm256_castps_si256(v[i]);
  transpose(t);
  __m256 s[8];
  for (int i = 0; i < 8; ++i) s[i] = _mm256_castsi256_ps(t[i]);
  for (int n = 4; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) s[i] = _mm256_add_ps(s[i], s[i + n]);
  return s[0];
}

// x for 8 rows of w that begin at output row j, times their scales; 0 for rows not requested.
__m256 x_of_rows(const float* x, int j, int n, const float* scale) {
  const __m256i asked = _mm256_andnot_si256(lane_mask(-j), lane_mask(n - j));
  return _mm256_mul_ps(_mm256_maskload_ps(x + j, asked), _mm256_load_ps(scale));
}

// Takes 8 columns of some panels at a time, widened once for all rows of x. Lanes are rows of w, so
// lanes are summed at the end.
template <class Type>
void gemm_transposed(const GemmArgs& a) {
  constexpr int kPanels = 16, kWidth = 8;
  const PanelRange range = panels_of(a);
  Column w[kPanels][kWidth] = {};
  alignas(32) float scales[kPanels][kPanelRows];
  ScaleColumns columns(a.w);
  for (int col = 0, n; col < a.k; col += n) {
    n = columns.take(min(kWidth, a.k - col));
    for (int first = 0; first < range.n; first += kPanels) {
      const int n_panels = min(kPanels, range.n - first);
      for (int p = 0; p < n_panels; ++p) {
        const int64_t at = range.first + first + p;
        const char* from = bytes(a.w.data) + at * a.w.stride + col / Type::kColumns * kStepBytes;
        for (int c = 0; c < n; c += Type::kColumns, from += kStepBytes)
          Type::widen(from, [&](int j, __m256 low, __m256 high) { w[p][c + j] = {low, high}; });
        PanelScales(a.w, at).read(columns.block(), scales[p]);
        for (float& scale : scales[p]) scale *= Type::kLift;
      }
      for (int i = 0; i < a.m; ++i) {
        const float* x = reinterpret_cast<const float*>(x_row(a.x, i));
        __m256 acc[kWidth] = {};
        for (int p = 0; p < n_panels; ++p) {
          const int j = (first + p) * kPanelRows - range.skip;
          const __m256 low = x_of_rows(x, j, a.n, scales[p]);
          const __m256 high = x_of_rows(x, j + kLanes, a.n, scales[p] + kLanes);
#pragma GCC unroll 8
          for (int c = 0; c < kWidth; ++c) {
            acc[c] = _mm256_fmadd_ps(low, w[p][c].low, acc[c]);
            acc[c] = _mm256_fmadd_ps(high, w[p][c].high, acc[c]);
          }
        }
        float* const out = a.out + i * a.out_stride + col;
        const __m256 before = first == 0 ? __m256{} : load_floats(out, n);
        const __m256 sum = _mm256_mul_ps(sum_lanes(acc), _mm256_set1_ps(Type::kUnit));
        store_floats(out, n, _mm256_add_ps(before, sum));
      }
    }
  }
}

void gemm_transposed(const GemmArgs& a) {
  switch (a.w.type) {
    case WeightType::kF32:
      return gemm_transposed<F32>(a);
    case WeightType::kF16:
      return gemm_transposed<F16>(a);
    case WeightType::kBF16:
      return gemm_transposed<Bf16>(a);
    case WeightType::kF8E4M3:
      return gemm_transposed<E4m3>(a);
    case WeightType::kI8:
    case WeightType::kI4:
    case WeightType::kI4TwoLevel:
      return;  // for byte products only
  }
}

}  // namespace

void install_avx2_products(KernelTable& t) {
  t.layout = Layout::kPanels;
  t.pack = pack;
  t.gemm = avx2_gemm;
  t.gemm_transposed = gemm_transposed;
}

}  // namespace tandem::cpu
