// Byte products without VNNI. VPMADDUBSW adds two products in 16 bits and saturates, so 8-bit
// weights are split into even and odd bytes, widened and multiplied as words. With 4-bit codes
// eight of its results can be added before they must be widened.
#include "cpu_kernels/avx2_int8.h"

#include "cpu_kernels/avx2_lanes.h"

namespace tandem::cpu {

void avx2_gemm(const GemmArgs&);

namespace {

// Sixteen 16-bit lanes.
using Words = short __attribute__((vector_size(32)));

struct WordDot {
  static Integers add(Integers sum, __m256i x, __m256i w) {
    const __m256i even_x = _mm256_and_si256(x, _mm256_set1_epi16(255));
    const __m256i odd_x = _mm256_srli_epi16(x, 8);
    const __m256i even_w = _mm256_srai_epi16(_mm256_slli_epi16(w, 8), 8);
    const __m256i odd_w = _mm256_srai_epi16(w, 8);
    const __m256i even = _mm256_madd_epi16(even_x, even_w), odd = _mm256_madd_epi16(odd_x, odd_w);
    return (Integers)_mm256_add_epi32((__m256i)sum, _mm256_add_epi32(even, odd));
  }
};

constexpr int kStepsInWords = 8;                    // 8 * 2 * 255 * 8 = 32,640 < 2^15
constexpr int kColumnsInWords = 4 * kStepsInWords;  // divides every group

// Copies the number in each 32-bit lane to both of its words.
__m256i words_of(__m256i lanes) {
  return _mm256_or_si256(_mm256_slli_epi32(lanes, 16),
                         _mm256_and_si256(lanes, _mm256_set1_epi32(0xffff)));
}

// The bytes of half an INT4 step: columns 0 to 3 and 4 to 7 of eight rows.
struct Halves {
  __m256i first, second;
};
Halves bytes_of(__m256i pairs) {
  const __m256i lower = _mm256_set1_epi8(15);
  const __m256i codes = _mm256_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1, 0,
                                         1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
  return {_mm256_shuffle_epi8(codes, _mm256_and_si256(pairs, lower)),
          _mm256_shuffle_epi8(codes, _mm256_and_si256(_mm256_srli_epi16(pairs, 4), lower))};
}

// Sums of kStepsInWords steps of bytes, for M rows of x and N panels, in 2 MN accumulators of the
// 16 registers. Weights are memory operands; with two panels each broadcast of x serves four
// products.
struct FromBytes {
  template <int M, int N>
  static void sum(const char* const* x, const Block& b, int panel, int c, Words (&acc)[M][N][2]) {
    const auto step = [&](int s, auto take) {
#pragma GCC unroll 8
      for (int r = 0; r < M; ++r) {
        const __m256i xs = four_columns(x[r] + s * 4);
#pragma GCC unroll 2
        for (int p = 0; p < N; ++p)
#pragma GCC unroll 2
          for (int h = 0; h < 2; ++h)
            take(acc[r][p][h],
                 (Words)_mm256_maddubs_epi16(xs, load(b.w[panel + p] + s * kStepBytes + h * 32)));
      }
    };
    const int first = c / 4;
    step(first, [](Words& sum, Words products) { sum = products; });
#pragma GCC unroll 1
    for (int s = first + 1; s < first + kStepsInWords; ++s)
      step(s, [](Words& sum, Words products) { sum += products; });
  }
};

// Sums of one panel of codes, which become bytes in registers.
struct FromCodes {
  template <int M, int N>
  static void sum(const char* const* x, const Block& b, int panel, int c, Words (&acc)[M][N][2]) {
    static_assert(N == 1);
    const auto step = [&](int s, auto take) {
      fetch_weights(b.ahead[panel] + s * kStepBytes);
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        const Halves w = bytes_of(load(b.w[panel] + s * kStepBytes + h * 32));
#pragma GCC unroll 8
        for (int r = 0; r < M; ++r) {
          const Words products = (Words)_mm256_maddubs_epi16(four_columns(x[r] + s * 8), w.first);
          take(acc[r][0][h], products,
               (Words)_mm256_maddubs_epi16(four_columns(x[r] + s * 8 + 4), w.second));
        }
      }
    };
    const int first = c / 8;
    step(first, [](Words& sum, Words low, Words high) { sum = low + high; });
#pragma GCC unroll 1
    for (int s = first + 1; s < first + kStepsInWords / 2; ++s)
      step(s, [](Words& sum, Words low, Words high) { sum += low + high; });
  }
};

// With two-level scales, widening multiplies by the row's multiplier, otherwise by one.
template <class From, int M, int N, bool kTwoLevel>
void tile_i4(const char* const* x, const Block& b, int panel, Sum* sums) {
  __m256i times[N][2];
  for (auto& of_panel : times) of_panel[0] = of_panel[1] = _mm256_set1_epi16(1);
  for (int part = 0, at = 0; part < b.n / b.part; ++part) {
    Integers total[M][N][2] = {};
    for (int c = 0; c < b.part; c += kColumnsInWords, at += kColumnsInWords) {
      if (kTwoLevel && c % b.group == 0)
        for (int p = 0; p < N; ++p)
          for (int h = 0; h < 2; ++h)
            times[p][h] = words_of(
                multipliers_of(b.multipliers[panel + p] + c / b.group * kMultipliers + h * 8));
      Words acc[M][N][2];
      From::template sum<M, N>(x, b, panel, at, acc);
#pragma GCC unroll 8
      for (int r = 0; r < M; ++r)
#pragma GCC unroll 2
        for (int p = 0; p < N; ++p)
#pragma GCC unroll 2
          for (int h = 0; h < 2; ++h)
            total[r][p][h] += (Integers)_mm256_madd_epi16((__m256i)acc[r][p][h], times[p][h]);
    }
    add_sums<M, N>(total, b, panel, part, sums);
  }
}

template <class From, int M, int N, bool kTwoLevel>
void group_i4(const char* const* x, const Block& b, int, Sum* sums) {
  for (int p = 0; p < kGroup; p += N) tile_i4<From, M, N, kTwoLevel>(x, b, p, sums);
}

template <class From, int M, int N, bool kTwoLevel>
constexpr Tiles kI4Pair = {tile_i4<From, M, 1, kTwoLevel>, group_i4<From, M, N, kTwoLevel>};
template <bool kTwoLevel>
constexpr Tiles kI4Tiles[] = {kI4Pair<FromBytes, 1, 2, kTwoLevel>,
                              kI4Pair<FromBytes, 2, 2, kTwoLevel>,
                              kI4Pair<FromBytes, 3, 2, kTwoLevel>};
template <bool kTwoLevel>
constexpr Tiles kFewI4[] = {
    kI4Pair<FromCodes, 1, 1, kTwoLevel>, kI4Pair<FromCodes, 2, 1, kTwoLevel>,
    kI4Pair<FromCodes, 3, 1, kTwoLevel>, kI4Pair<FromCodes, 4, 1, kTwoLevel>};
constexpr int kMaxFewRows = 4;

// Widens INT4 steps to twice as many steps of bytes.
void spread_i4(const char* from, const char* ahead, int n_steps, char* to) {
  for (int s = 0; s < n_steps; ++s, from += kStepBytes, to += 2 * kStepBytes) {
    fetch_weights(ahead + s * kStepBytes);
    for (int h = 0; h < kStepBytes; h += 32) {
      const Halves w = bytes_of(load(from + h));
      auto* const out = reinterpret_cast<__m256i*>(to + h);
      _mm256_store_si256(out, w.first);
      _mm256_store_si256(out + 2, w.second);
    }
  }
}

template <bool kTwoLevel>
void gemm_i4_words(const GemmArgs& a) {
  constexpr int kPart = kTwoLevel ? kColumns : kI4Columns;
  const Order order = {.part = kPart, .block = kPart};
  if (a.m <= kMaxFewRows)
    return multiply(a, order, [&](Block& b, int first, int m, Sum* sums) {
      add_rows(a, kFewI4<kTwoLevel>, b, 1, first, m, sums);
    });
  alignas(64) char room[kGroup * kWideBytes];
  multiply(a, order, [&](Block& b, int first, int m, Sum* sums) {
    for (int p = 0; p < b.n_panels; ++p) {
      spread_i4(b.w[p], b.ahead[p], b.n / 8, room + p * kWideBytes);
      b.w[p] = room + p * kWideBytes;
    }
    add_rows(a, kI4Tiles<kTwoLevel>, b, 1, first, m, sums);
  });
}

void gemm(const GemmArgs& a) {
  if (a.x.type != ActivationType::kU8) return avx2_gemm(a);
  a.w.type == WeightType::kI8           ? gemm_i8<WordDot>(a)
  : a.w.type == WeightType::kI4TwoLevel ? gemm_i4_words<true>(a)
                                        : gemm_i4_words<false>(a);
}

// The first n of 8 floats, padded with zeros.
__m256 load_floats(const float* from, int n) { return _mm256_maskload_ps(from, lane_mask(n)); }

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
