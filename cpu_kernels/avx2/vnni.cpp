// Byte products with AVX-VNNI: one instruction per four products in a lane.
#include "cpu_kernels/avx2/int8.h"

namespace tandem::cpu {

void avx2_gemm(const GemmArgs&);

namespace {

// Adds sums of four products of unsigned and signed bytes to each lane.
Integers dot(Integers sum, __m256i x, __m256i w) {
  return (Integers)_mm256_dpbusd_avx_epi32((__m256i)sum, x, w);
}

template <int M, int N, bool kFirst>
void tile(const char* const* x, const Block& b, int panel, Sum* sums) {
  const int n_parts = b.n / b.part, n_steps = (b.part + 3) / 4;
  for (int part = 0, s = 0; part < n_parts; ++part) {
    Integers acc[M][N][2];
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
      for (int p = 0; p < N; ++p) acc[i][p][0] = acc[i][p][1] = Integers{};
    for (const int end = s + n_steps; s < end; ++s) {
#pragma GCC unroll 8
      for (int p = 0; p < N; ++p) {
        const char* from = b.w[panel + p] + s * kStepBytes;
        if (kFirst) fetch_weights(b.ahead[panel + p] + s * kStepBytes);
        const __m256i low = load(from), high = load(from + 32);
#pragma GCC unroll 8
        for (int i = 0; i < M; ++i) {
          const __m256i xs = four_columns(x[i] + s * 4);
          acc[i][p][0] = dot(acc[i][p][0], xs, low);
          acc[i][p][1] = dot(acc[i][p][1], xs, high);
        }
      }
    }
    add_sums<M, N>(acc, b, panel, part, sums);
  }
}

template <int M, int N, bool kFirst>
void tile_of_group(const char* const* x, const Block& b, int, Sum* sums) {
  for (int p = 0; p < kGroup; p += N) tile<M, N, kFirst>(x, b, p, sums);
}

// Widens INT4 steps to twice as many INT8 steps of 16 times the codes.
void widen_i4(const char* from, const char* ahead, int n_steps, char* to) {
  const __m256i upper = _mm256_set1_epi8(static_cast<char>(0xf0));
  for (int s = 0; s < n_steps; ++s, from += kStepBytes, to += 2 * kStepBytes) {
    fetch_weights(ahead + s * kStepBytes);
    for (int h = 0; h < kStepBytes; h += 32) {
      const __m256i codes = load(from + h);
      const __m256i first = _mm256_and_si256(_mm256_slli_epi16(codes, 4), upper);
      const __m256i second = _mm256_and_si256(codes, upper);
      _mm256_store_si256(reinterpret_cast<__m256i*>(to + h), first);
      _mm256_store_si256(reinterpret_cast<__m256i*>(to + kStepBytes + h), second);
    }
  }
}

// Widens codes times multipliers, which are exact INT8; avx512/i4.h explains the arithmetic.
void widen_i4(const char* from, const char* ahead, const int8_t* multipliers, int group_steps,
              int n_steps, char* to) {
  const __m256i low = _mm256_set1_epi8(0x0f);
  for (int s = 0; s < n_steps; s += group_steps, multipliers += kMultipliers) {
    for (int h = 0; h < kStepBytes; h += 32) {
      const __m256i m = multipliers_of(multipliers + h / 4);
      const __m256i negative = _mm256_srai_epi32(m, 31), magnitude = _mm256_abs_epi32(m);
      const __m256i times = _mm256_or_si256(magnitude, _mm256_slli_epi32(magnitude, 16));
      const __m256i bytes = _mm256_or_si256(times, _mm256_slli_epi32(times, 8));
      const __m256i less =
          _mm256_sub_epi8(_mm256_slli_epi16(bytes, 3), _mm256_and_si256(bytes, negative));
      const __m256i flip = _mm256_xor_si256(_mm256_set1_epi8(static_cast<char>(0x88)), negative);
      for (int i = s; i < s + group_steps; ++i) {
        if (h == 0) fetch_weights(ahead + i * kStepBytes);
        const __m256i codes = _mm256_xor_si256(load(from + i * kStepBytes + h), flip);
        const __m256i first = _mm256_and_si256(codes, low);
        const __m256i second = _mm256_and_si256(_mm256_srli_epi16(codes, 4), low);
        auto* const out = reinterpret_cast<__m256i*>(to + i * 2 * kStepBytes + h);
        _mm256_store_si256(out, _mm256_sub_epi8(_mm256_mullo_epi16(first, times), less));
        _mm256_store_si256(out + 2, _mm256_sub_epi8(_mm256_mullo_epi16(second, times), less));
      }
    }
  }
}

template <int M, int N, bool kFirst>
constexpr Tiles kPair = {tile<M, 1, kFirst>, tile_of_group<M, N, kFirst>};

// kFirst: tiles of the first rows that read a block; they prefetch what follows it.
template <bool kFirst>
constexpr Tiles kTiles[] = {kPair<1, 4, kFirst>, kPair<2, 2, kFirst>, kPair<3, 1, kFirst>,
                            kPair<4, 1, kFirst>, kPair<5, 1, kFirst>, kPair<6, 1, kFirst>};

void gemm_i8(const GemmArgs& a) {
  multiply(a, {.part = kColumns, .ahead = kColumns / 4 * kStepBytes},
           [&a](const Block& b, int first, int m, Sum* sums) {
             add_rows(a, kTiles<true>, kTiles<false>, b, 1, first, m, sums);
           });
}

void gemm_i4(const GemmArgs& a) {
  alignas(64) char room[kGroup * kWideBytes];
  multiply(a, {.part = kI4Columns, .block = kI4Columns, .unit = 1 / 16.f},
           [&](Block& b, int first, int m, Sum* sums) {
             for (int p = 0; p < b.n_panels; ++p) {
               widen_i4(b.w[p], b.ahead[p], b.n / 8, room + p * kWideBytes);
               b.w[p] = room + p * kWideBytes;
             }
             add_rows(a, kTiles<false>, b, 1, first, m, sums);
           });
}

void gemm_i4_two_level(const GemmArgs& a) {
  alignas(64) char room[kGroup * kWideBytes];
  multiply(a, {.part = kColumns}, [&](Block& b, int first, int m, Sum* sums) {
    for (int p = 0; p < b.n_panels; ++p) {
      char* const to = room + p * kWideBytes;
      widen_i4(b.w[p], b.ahead[p], b.multipliers[p], b.group / 8, b.n / 8, to);
      b.w[p] = to;
    }
    add_rows(a, kTiles<false>, b, 1, first, m, sums);
  });
}

void gemm(const GemmArgs& a) {
  if (a.x.type != ActivationType::kU8) return avx2_gemm(a);
  a.w.type == WeightType::kI8           ? gemm_i8(a)
  : a.w.type == WeightType::kI4TwoLevel ? gemm_i4_two_level(a)
                                        : gemm_i4(a);
}

}  // namespace

void install_avx2_vnni(KernelTable& t) { t.gemm = gemm; }

}  // namespace tandem::cpu
