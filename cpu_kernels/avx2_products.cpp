// Products of float activations over panels with AVX2, FMA and F16C. The first rows of x widen the
// weights in registers and store them as float in the level-1 cache, for all other rows.
#include "cpu_kernels/avx2_lanes.h"
#include "cpu_kernels/panels.h"

namespace tandem::cpu {
namespace {

constexpr int kColumns = 64;                       // 16 KiB of float in a group
constexpr int kWideBytes = kColumns * kStepBytes;  // per panel, in steps of one column

// Sixteen rows of one column.
struct Column {
  __m256 low, high;
};

void transpose(__m256i (&r)[8]) {
  __m256i t[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x20);
    t[i + 4] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x31);
  }
  for (int i = 0; i < 8; ++i) r[i] = t[i];
}

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

__m256i load(const char* from) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(from)); }

struct F32 {
  static constexpr int kColumns = 1;
  static constexpr float kLift = 1, kUnit = 1;
  static void widen(const char* from, Column* to) {
    to[0] = {_mm256_castsi256_ps(load(from)), _mm256_castsi256_ps(load(from + 32))};
  }
};

struct Bf16 {
  static constexpr int kColumns = 2;
  static constexpr float kLift = 1, kUnit = 1;
  static __m256 first(__m256i v) { return _mm256_castsi256_ps(_mm256_slli_epi32(v, 16)); }
  static __m256 second(__m256i v) {
    return _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32(-65536)));
  }
  static void widen(const char* from, Column* to) {
    const __m256i low = load(from), high = load(from + 32);
    to[0] = {first(low), first(high)};
    to[1] = {second(low), second(high)};
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
  static void widen(const char* from, Column* to) {
    const __m256i low = sort(load(from)), high = sort(load(from + 32));
    to[0] = {low_halves(low), low_halves(high)};
    to[1] = {high_halves(low), high_halves(high)};
  }
};

// Sign and magnitude of an E4M3 code, shifted into place, form a BF16 number and so a float: 2^-120
// times the value, subnormals included. To avoid subnormal products, x or a stored weight is
// multiplied by 2^48; the unit of the sums makes up for the rest.
struct E4m3 {
  static constexpr int kColumns = 4;
  static constexpr float kLift = 0x1p48f, kUnit = 0x1p72f;
  static __m256i bf16_of(__m256i codes_above) {
    return _mm256_and_si256(_mm256_srai_epi16(codes_above, 4),
                            _mm256_set1_epi16(static_cast<short>(0x87f0)));
  }
  static __m256 low_words(__m256i v) {
    return _mm256_castsi256_ps(_mm256_unpacklo_epi16(_mm256_setzero_si256(), v));
  }
  static __m256 high_words(__m256i v) {
    return _mm256_castsi256_ps(_mm256_unpackhi_epi16(_mm256_setzero_si256(), v));
  }
  static void widen(const char* from, Column* to) {
    const __m256i low = load(from), high = load(from + 32);
    const __m256i even_low = bf16_of(_mm256_slli_epi16(low, 8)), odd_low = bf16_of(low);
    const __m256i even_high = bf16_of(_mm256_slli_epi16(high, 8)), odd_high = bf16_of(high);
    to[0] = {low_words(even_low), low_words(even_high)};
    to[1] = {low_words(odd_low), low_words(odd_high)};
    to[2] = {high_words(even_low), high_words(even_high)};
    to[3] = {high_words(odd_low), high_words(odd_high)};
  }
};

// Multiplies with an addition of 0: a multiplication of subnormal numbers is slow, an FMA is not.
template <class Type>
Column lift(const Column& w) {
  if constexpr (Type::kLift == 1) return w;
  const __m256 factor = _mm256_set1_ps(Type::kLift), zero = _mm256_setzero_ps();
  return {_mm256_fmadd_ps(w.low, factor, zero), _mm256_fmadd_ps(w.high, factor, zero)};
}

template <int M, int N>
void add_sums(const Column (&acc)[M][N], const Block& b, int panel, Sum* sums) {
#pragma GCC unroll 8
  for (int p = 0; p < N; ++p) {
    const float* scale = b.scale[panel + p];
    const __m256 low = _mm256_loadu_ps(scale), high = _mm256_loadu_ps(scale + 8);
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) {
      float* sum = sums[i] + (panel + p) * kPanelRows;
      _mm256_store_ps(sum, _mm256_fmadd_ps(acc[i][p].low, low, _mm256_load_ps(sum)));
      _mm256_store_ps(sum + 8, _mm256_fmadd_ps(acc[i][p].high, high, _mm256_load_ps(sum + 8)));
    }
  }
}

void add_product(Column& acc, const Column& w, const char* x) {
  const __m256 xs = _mm256_broadcast_ss(reinterpret_cast<const float*>(x));
  acc.low = _mm256_fmadd_ps(xs, w.low, acc.low);
  acc.high = _mm256_fmadd_ps(xs, w.high, acc.high);
}

// Widens columns and, if kKeep, stores them in b.wide. Few rows take several panels at a time so
// that sums do not wait for each other.
template <class Type, int M, int N, bool kKeep>
void tile(const char* const* x, const Block& b, int panel, Sum* sums) {
  Column acc[M][N];
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
    for (int p = 0; p < N; ++p) acc[i][p] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
  for (int c = 0, s = 0; c < b.n; c += Type::kColumns, s += kStepBytes) {
    const int left = b.n - c;  // x ends at the same column as the weights
#pragma GCC unroll 8
    for (int p = 0; p < N; ++p) {
      const char* from = b.w[panel + p] + s;
      fetch_weights(b.ahead[panel + p] + s);
      Column w[Type::kColumns];
      Type::widen(from, w);
#pragma GCC unroll 8
      for (int j = 0; j < Type::kColumns; ++j) {
        if constexpr (kKeep) {
          w[j] = lift<Type>(w[j]);
          char* to = b.wide + (panel + p) * kWideBytes + (c + j) * kStepBytes;
          _mm256_store_ps(reinterpret_cast<float*>(to), w[j].low);
          _mm256_store_ps(reinterpret_cast<float*>(to) + 8, w[j].high);
        }
        if (j > 0 && j >= left) continue;
#pragma GCC unroll 8
        for (int i = 0; i < M; ++i) add_product(acc[i][p], w[j], x[i] + (c + j) * 4);
      }
    }
  }
  add_sums<M, N>(acc, b, panel, sums);
}

template <class Type, int M, int N, bool kKeep>
void tile_of_group(const char* const* x, const Block& b, int, Sum* sums) {
  for (int p = 0; p < kGroup; p += N) tile<Type, M, N, kKeep>(x, b, p, sums);
}

template <class Type, int M, int N, bool kKeep>
constexpr Tiles kPair = {tile<Type, M, 1, kKeep>, tile_of_group<Type, M, N, kKeep>};

constexpr int kMaxFewRows = 2;  // rows of x
template <class Type>
constexpr Tiles kFew[kMaxFewRows] = {kPair<Type, 1, 4, false>, kPair<Type, 2, 2, false>};

constexpr Tiles kWide[] = {kPair<F32, 1, 4, false>, kPair<F32, 2, 2, false>,
                           kPair<F32, 3, 2, false>, kPair<F32, 4, 1, false>,
                           kPair<F32, 5, 1, false>, kPair<F32, 6, 1, false>};

// Multiplies a block of columns of a few rows of x by `factor`.
void lift_rows(const GemmArgs& a, const Block& b, float factor, float (*to)[kColumns]) {
  for (int i = 0; i < a.m; ++i) {
    const float* x = reinterpret_cast<const float*>(x_row(a.x, i)) + b.col;
    for (int c = 0; c < b.n; ++c) to[i][c] = x[c] * factor;
  }
}

template <class Type>
void gemm(const GemmArgs& a) {
  alignas(64) char room[kGroup * kWideBytes];
  alignas(64) float lifted[kMaxFewRows][kColumns];
  const bool lifts = Type::kLift != 1 && a.m <= kMaxFewRows;
  const Order order = {.part = kColumns, .unit = Type::kUnit};
  multiply(a, order, [&](Block b, int first, int m, Sum* sums) {
    GemmArgs args = a;
    if (lifts) {
      lift_rows(a, b, Type::kLift, lifted);
      args.x = {lifted, sizeof(lifted[0]), ActivationType::kF32};
      b.col = 0;
    }
    add_widened_rows<2>(args, kFew<Type>, kPair<Type, 2, 2, true>, kWide, kWide, b, room,
                        kWideBytes, sizeof(float), first, m, sums);
  });
}

void gemm_f32(const GemmArgs& a) {
  multiply(a, {256}, [&](const Block& b, int first, int m, Sum* sums) {
    add_rows(a, kWide, b, sizeof(float), first, m, sums);
  });
}

}  // namespace

void avx2_gemm(const GemmArgs& a) {
  switch (a.w.type) {
    case WeightType::kF32:
      return gemm_f32(a);
    case WeightType::kF16:
      return gemm<F16>(a);
    case WeightType::kBF16:
      return gemm<Bf16>(a);
    case WeightType::kF8E4M3:
      return gemm<E4m3>(a);
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
        for (int c = 0; c < n; c += Type::kColumns, from += kStepBytes) Type::widen(from, w[p] + c);
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
        const __m256i wanted = lane_mask(n);
        const __m256 before = first == 0 ? __m256{} : _mm256_maskload_ps(out, wanted);
        const __m256 sum = _mm256_mul_ps(sum_lanes(acc), _mm256_set1_ps(Type::kUnit));
        _mm256_maskstore_ps(out, wanted, _mm256_add_ps(before, sum));
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
