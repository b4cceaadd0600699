// Byte products without VNNI. VPMADDUBSW adds two products in 16 bits and saturates, so 8-bit
// weights are split into even and odd bytes and multiplied as words. With 4-bit codes eight of its
// results can be added before they must be widened.
#include "cpu_kernels/avx2/int8.h"

#include "cpu_kernels/avx2/tiles.h"

namespace tandem::cpu {

void avx2_gemm(const GemmArgs&);

namespace {

// Sixteen 16-bit lanes.
using Words = short __attribute__((vector_size(32)));

// A line of weights, one step of a panel, becomes two wide lines: words of INT8 or bytes of INT4.
// Each is multiplied by four bytes of x.
constexpr int kWideLines = 2, kWideLineBytes = 64;
struct WideLine {
  __m256i low, high;
};

// Words of 256 times the even and the odd columns: without this factor, two more shifts.
struct StoredI8 {
  [[gnu::always_inline]] static WideLine line(const char* from, int i) {
    const __m256i low = load(from), high = load(from + 32);
    if (i == 0) return {_mm256_slli_epi16(low, 8), _mm256_slli_epi16(high, 8)};
    const __m256i upper = _mm256_set1_epi16(static_cast<short>(0xff00));
    return {_mm256_and_si256(low, upper), _mm256_and_si256(high, upper)};
  }
};

// Columns 0 to 3 and 4 to 7 of eight.
struct StoredI4 {
  static constexpr int kLineBytes = kStepBytes;
  [[gnu::always_inline]] static __m256i bytes_of(__m256i codes) {
    const __m256i values = _mm256_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1,
                                            0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
    return _mm256_shuffle_epi8(values, _mm256_and_si256(codes, _mm256_set1_epi8(15)));
  }
  [[gnu::always_inline]] static WideLine line(const char* from, int i) {
    const __m256i low = load(from), high = load(from + 32);
    if (i == 0) return {bytes_of(low), bytes_of(high)};
    return {bytes_of(_mm256_srli_epi16(low, 4)), bytes_of(_mm256_srli_epi16(high, 4))};
  }
};

// Lines that another tile has widened.
struct Wide {
  static constexpr int kLineBytes = kWideLines * kWideLineBytes;
  [[gnu::always_inline]] static WideLine line(const char* from, int i) {
    return {load(from + i * kWideLineBytes), load(from + i * kWideLineBytes + 32)};
  }
};

// sums += products of x and a wide line: words of INT8, bytes of INT4. With intrinsics, GCC 12
// spills some of the sums: a fifth slower for INT8, a third or more for INT4.
[[gnu::always_inline]] inline void add(__m256i x, const WideLine& w, Integers (&sums)[2]) {
  __m256i products;
  asm("vpmaddwd %[low], %[x], %[p]\n\tvpmaddwd %[high], %[x], %[x]\n\t"
      "vpaddd %[p], %[a], %[a]\n\tvpaddd %[x], %[b], %[b]"
      : [a] "+x"(sums[0]), [b] "+x"(sums[1]), [x] "+x"(x), [p] "=&x"(products)
      : [low] "x"(w.low), [high] "x"(w.high));
}
[[gnu::always_inline]] inline void add(__m256i x, const WideLine& w, Words (&sums)[2]) {
  __m256i products;
  asm("vpmaddubsw %[low], %[x], %[p]\n\tvpmaddubsw %[high], %[x], %[x]\n\t"
      "vpaddw %[p], %[a], %[a]\n\tvpaddw %[x], %[b], %[b]"
      : [a] "+x"(sums[0]), [b] "+x"(sums[1]), [x] "+x"(x), [p] "=&x"(products)
      : [low] "x"(w.low), [high] "x"(w.high));
}

[[gnu::always_inline]] inline void begin(__m256i x, const WideLine& w, Words (&sums)[2]) {
  sums[0] = (Words)_mm256_maddubs_epi16(x, w.low);
  sums[1] = (Words)_mm256_maddubs_epi16(x, w.high);
}

// What a tile does besides its products: it fetches the lines ahead, and keeps the wide lines.
enum class Besides { kNothing, kFetch, kFetchAndKeep };

template <int M, int N, class Vector>
[[gnu::always_inline]] inline void clear(Vector (&sums)[M][N][2]) {
  each<M>([&](auto r) __attribute__((always_inline)) {
    each<N>([&](auto p)
                __attribute__((always_inline)) { sums[r][p][0] = sums[r][p][1] = Vector{}; });
  });
}

// INT8: a block of a row of x in words; the even of every four columns, then the odd ones.
using SplitRow = char[2 * kColumns];

void split(const char* x, int n, char* to) {
  for (int c = 0; c < n; c += 32) {
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + c));
    auto* const even = reinterpret_cast<__m256i*>(to + c);
    _mm256_store_si256(even, _mm256_and_si256(v, _mm256_set1_epi16(255)));
    _mm256_store_si256(even + kColumns / 32, _mm256_srli_epi16(v, 8));
  }
}

// 256 columns of 256 times the products: 255 * 128 * 256 < 2^23.
constexpr int kColumnsInLanes = 256;

// Adds a block of N panels: add_step(column, sums) adds four columns, in units of 1/256.
template <int M, int N, class AddStep>
[[gnu::always_inline]] inline void add_i8(const Block& b, int panel, Sum* sums, AddStep add_step) {
  Integers total[M][N][2] = {};
  for (int col = 0; col < b.n; col += kColumnsInLanes) {
    Integers acc[M][N][2];
    clear(acc);
    for (int c = col, end = min(b.n, col + kColumnsInLanes); c < end; c += 4) add_step(c, acc);
    each<M>([&](auto r) __attribute__((always_inline)) {
      each<N>([&](auto p) __attribute__((always_inline)) {
        total[r][p][0] += acc[r][p][0] >> 8;
        total[r][p][1] += acc[r][p][1] >> 8;
      });
    });
  }
  add_sums<M, N>(total, b, panel, 0, sums);
}

template <int M, Besides kBesides>
void panel_i8(const SplitRow* x, const Block& b, int panel, Sum* sums) {
  const char *from_x = x[0], *w = b.w[panel];
  LinesAhead ahead(b, panel, (b.n + 3) / 4);
  add_i8<M, 1>(
      b, panel, sums, [&](int, Integers(&acc)[M][1][2]) __attribute__((always_inline)) {
        if (kBesides == Besides::kFetch) ahead.fetch();
        each<kWideLines>([&](auto i) __attribute__((always_inline)) {
          const WideLine line = StoredI8::line(w, i);
          each<M>([&](auto r) __attribute__((always_inline)) {
            constexpr int kOffset = r * int{sizeof(SplitRow)} + i * kColumns;
            add(four_columns(from_x + kOffset), line, acc[r][0]);
          });
        });
        from_x += 4;
        w += kStepBytes;
      });
}

template <int M, Besides kBesides, bool kWholeGroup>
void tile_i8(const char* const* x, const Block& b, int panel, Sum* sums) {
  alignas(64) SplitRow rows[M];
  for (int r = 0; r < M; ++r) split(x[r], b.n, rows[r]);
  if (!kWholeGroup) return panel_i8<M, kBesides>(rows, b, panel, sums);
  for (int p = 0; p < kGroup; ++p) panel_i8<M, kBesides>(rows, b, p, sums);
}

// One row is split in registers: its tile reads N panels at once, little lies between their loads.
template <int N>
void one_row_i8(const char* const* x, const Block& b, int panel, Sum* sums) {
  add_i8<1, N>(
      b, panel, sums, [&](int c, Integers(&acc)[1][N][2]) __attribute__((always_inline)) {
        const __m256i v = four_columns(x[0] + c);
        const __m256i words[] = {_mm256_and_si256(v, _mm256_set1_epi16(255)),
                                 _mm256_srli_epi16(v, 8)};
        each<N>([&](auto p) __attribute__((always_inline)) {
          const int64_t at = int64_t{c} * (kStepBytes / 4);
          fetch_weights(b.ahead[panel + p] + at);
          each<kWideLines>([&](auto i) __attribute__((always_inline)) {
            add(words[i], StoredI8::line(b.w[panel + p] + at, i), acc[0][p]);
          });
        });
      });
}

template <int M, Besides kBesides>
constexpr Tiles kI8 = {tile_i8<M, kBesides, false>, tile_i8<M, kBesides, true>};
template <Besides kBesides>
constexpr Tiles kI8Tiles[] = {{one_row_i8<1>, one_row_i8<kGroup>},
                              kI8<2, kBesides>,
                              kI8<3, kBesides>,
                              kI8<4, kBesides>,
                              kI8<5, kBesides>,
                              kI8<6, kBesides>};

void gemm_i8_words(const GemmArgs& a) {
  multiply(a, {.part = kColumns, .ahead = kColumns / 4 * kStepBytes},
           [&](const Block& b, int first, int m, Sum* sums) {
             add_rows(a, kI8Tiles<Besides::kFetch>, kI8Tiles<Besides::kNothing>, b, 1, first, m,
                      sums);
           });
}

constexpr int kStepsInWords = 8;                    // 8 * 2 * 255 * 8 = 32,640 < 2^15
constexpr int kColumnsInWords = 4 * kStepsInWords;  // divides every group

// Copies the number in each 32-bit lane to both of its words.
__m256i words_of(__m256i lanes) {
  return _mm256_or_si256(_mm256_slli_epi32(lanes, 16),
                         _mm256_and_si256(lanes, _mm256_set1_epi32(0xffff)));
}

// Scales of INT4: of two levels, or BF16 for groups of columns. Groups as wide as the sums in words
// need no integers in memory.
enum class Groups { kTwoLevel, kSome, kInWords };

// With two-level scales, widening multiplies by the row's multiplier, otherwise by one.
template <class From, int M, Besides kBesides, Groups kGroups>
void add_i4(const char* const* rows, const Block& b, int panel, Sum* sums) {
  const char* x[M];
  each<M>([&](auto r) __attribute__((always_inline)) { x[r] = rows[r]; });
  const char* w = b.w[panel];
  char* wide = kBesides == Besides::kFetchAndKeep ? b.wide + panel * kWideBytes : nullptr;
  LinesAhead ahead(b, panel, b.n / 8);
  __m256i times[2] = {_mm256_set1_epi16(1), _mm256_set1_epi16(1)};
  const int part_columns = kGroups == Groups::kInWords ? kColumnsInWords : b.part;
  for (int part = 0, n_parts = b.n / b.part; part < n_parts; ++part) {
    Integers total[M][1][2];
    clear(total);
    const int8_t* multipliers = b.multipliers[panel];
    int group_end = 0;
    for (int c = 0; c < part_columns; c += kColumnsInWords) {
      if (kGroups == Groups::kTwoLevel && c == group_end) {
        for (int h = 0; h < 2; ++h) times[h] = words_of(multipliers_of(multipliers + h * 8));
        multipliers += kMultipliers;
        group_end += b.group;
      }
      Words acc[M][2];
      each<kStepsInWords>([&](auto step) __attribute__((always_inline)) {
        constexpr int i = step % kWideLines;
        if (kBesides != Besides::kNothing && i == 0) ahead.fetch();
        const WideLine line = From::line(w, i);
        if constexpr (kBesides == Besides::kFetchAndKeep) {
          _mm256_store_si256(reinterpret_cast<__m256i*>(wide), line.low);
          _mm256_store_si256(reinterpret_cast<__m256i*>(wide + 32), line.high);
          wide += kWideLineBytes;
        }
        each<M>([&](auto r) __attribute__((always_inline)) {
          const __m256i columns = four_columns(x[r] + step * 4);
          if constexpr (step == 0) {
            begin(columns, line, acc[r]);
          } else {
            add(columns, line, acc[r]);
          }
        });
        if (i == kWideLines - 1) w += From::kLineBytes;
      });
      each<M>([&](auto r) __attribute__((always_inline)) {
        x[r] += kColumnsInWords;
        each<2>([&](auto h) __attribute__((always_inline)) {
          total[r][0][h] += (Integers)_mm256_madd_epi16((__m256i)acc[r][h], times[h]);
        });
      });
    }
    add_sums<M, 1>(total, b, panel, part, sums);
  }
}

template <class From, int M, Besides kBesides, Groups kGroups>
void group_i4(const char* const* x, const Block& b, int, Sum* sums) {
  for (int p = 0; p < kGroup; ++p) add_i4<From, M, kBesides, kGroups>(x, b, p, sums);
}

constexpr int kMaxFewRows = 4;

template <class From, int M, Besides kBesides, Groups kGroups>
constexpr Tiles kI4 = {add_i4<From, M, kBesides, kGroups>, group_i4<From, M, kBesides, kGroups>};
template <Groups kGroups>
constexpr Tiles kFewI4[] = {
    kI4<StoredI4, 1, Besides::kFetch, kGroups>, kI4<StoredI4, 2, Besides::kFetch, kGroups>,
    kI4<StoredI4, 3, Besides::kFetch, kGroups>, kI4<StoredI4, 4, Besides::kFetch, kGroups>};
template <Groups kGroups>
constexpr Tiles kWideI4[] = {
    kI4<Wide, 1, Besides::kNothing, kGroups>, kI4<Wide, 2, Besides::kNothing, kGroups>,
    kI4<Wide, 3, Besides::kNothing, kGroups>, kI4<Wide, 4, Besides::kNothing, kGroups>,
    kI4<Wide, 5, Besides::kNothing, kGroups>};

template <Groups kGroups>
void gemm_i4_words(const GemmArgs& a) {
  constexpr int kPart = kGroups == Groups::kTwoLevel ? kColumns : kI4Columns;
  alignas(64) char room[kGroup * kWideBytes];
  multiply(a, {.part = kPart, .block = kPart}, [&](Block& b, int first, int m, Sum* sums) {
    add_widened_rows<kMaxFewRows>(
        a, kFewI4<kGroups>, kI4<StoredI4, kMaxFewRows, Besides::kFetchAndKeep, kGroups>,
        kWideI4<kGroups>, kWideI4<kGroups>, b, room, kWideBytes, 1, first, m, sums);
  });
}

void gemm(const GemmArgs& a) {
  if (a.x.type != ActivationType::kU8) return avx2_gemm(a);
  a.w.type == WeightType::kI8           ? gemm_i8_words(a)
  : a.w.type == WeightType::kI4TwoLevel ? gemm_i4_words<Groups::kTwoLevel>(a)
  : a.w.block_cols == kColumnsInWords   ? gemm_i4_words<Groups::kInWords>(a)
                                        : gemm_i4_words<Groups::kSome>(a);
}

void encode(const EncodeArgs& a) {
  __m256 max = _mm256_setzero_ps();
  const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  for (int c = 0; c < a.k; c += 8)
    max = _mm256_max_ps(max, _mm256_and_ps(magnitude, load_floats(a.from + c, a.k - c)));
  *a.scale = max_lane(max) / 127;
  const __m256 inverse = _mm256_set1_ps(*a.scale > 0 ? 1 / *a.scale : 0);
  char* to = static_cast<char*>(a.to);
  for (int c = 0; c < encoded_columns(a.k); c += 8) {
    const __m256 x = _mm256_mul_ps(load_floats(a.from + c, a.k - c), inverse);
    const __m256i code = _mm256_add_epi32(_mm256_cvtps_epi32(x), _mm256_set1_epi32(128));
    const __m128i words =
        _mm_packs_epi32(_mm256_castsi256_si128(code), _mm256_extracti128_si256(code, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to + c), _mm_packus_epi16(words, words));
  }
}

}  // namespace

void install_avx2_int8(KernelTable& t) {
  t.activation[static_cast<int>(WeightType::kI8)] = ActivationType::kU8;
  t.activation[static_cast<int>(WeightType::kI4)] = ActivationType::kU8;
  t.activation[static_cast<int>(WeightType::kI4TwoLevel)] = ActivationType::kU8;
  t.encode = encode;
  t.gemm = gemm;
}

}  // namespace tandem::cpu
