// Read loops and peaks of AVX2 with FMA, and of AVX-VNNI.
#include <immintrin.h>

#include "cpu_kernels/peaks.h"

namespace tandem::cpu {
namespace {

// Hides 4 cycles of latency on 2 to 3 ports, and leaves registers for inputs.
constexpr int kChains = 12;

// Assembly, because compilers would merge equal chains of intrinsics into one.
void fma_f32(int64_t n_rounds) {
  __m256 sum[kChains] = {};
  const __m256 a = _mm256_set1_ps(0.5f), b = _mm256_set1_ps(0.25f);
  for (int64_t round = 0; round < n_rounds; ++round)
    for (__m256& s : sum) __asm__ volatile("vfmadd231ps %1, %2, %0" : "+x"(s) : "x"(a), "x"(b));
}

void multiply_pairs_int8(int64_t n_rounds) {
  __m256i sum[kChains] = {};
  const __m256i a = _mm256_set1_epi8(3), b = _mm256_set1_epi8(5), ones = _mm256_set1_epi16(1);
  for (int64_t round = 0; round < n_rounds; ++round)
    for (__m256i& s : sum)
      __asm__ volatile(
          "vpmaddubsw %1, %2, %%ymm15\n\tvpmaddwd %3, %%ymm15, %%ymm15\n\t"
          "vpaddd %%ymm15, %0, %0"
          : "+x"(s)
          : "x"(a), "x"(b), "x"(ones)
          : "xmm15");
}

// Eight sums of pairs of products of small codes fit 16 bits before one widening.
constexpr int kNarrowChains = 10, kNarrowProducts = 8;

void multiply_eight_pairs_int8(int64_t n_rounds) {
  __m256i sum = {}, narrow[kNarrowChains] = {};
  const __m256i a = _mm256_set1_epi8(3), b = _mm256_set1_epi8(5), ones = _mm256_set1_epi16(1);
  for (int64_t round = 0; round < n_rounds; ++round) {
    for (int product = 0; product < kNarrowProducts; ++product)
      for (__m256i& s : narrow)
        __asm__ volatile("vpmaddubsw %1, %2, %%ymm15\n\tvpaddw %%ymm15, %0, %0"
                         : "+x"(s)
                         : "x"(a), "x"(b)
                         : "xmm15");
    for (const __m256i& s : narrow)
      __asm__ volatile("vpmaddwd %2, %1, %%ymm15\n\tvpaddd %%ymm15, %0, %0"
                       : "+x"(sum)
                       : "x"(s), "x"(ones)
                       : "xmm15");
  }
}

void dot_int8(int64_t n_rounds) {
  __m256i sum[kChains] = {};
  const __m256i a = _mm256_set1_epi8(3), b = _mm256_set1_epi8(5);
  for (int64_t round = 0; round < n_rounds; ++round)
    for (__m256i& s : sum)
      __asm__ volatile("%{vex%} vpdpbusd %1, %2, %0" : "+x"(s) : "x"(a), "x"(b));
}

// A third each of multiply-adds, logical instructions and loads, as tiles of products have; of each
// kStarts in a round.
constexpr int kStarts = 8, kLogical = 4;

void start_mix(int64_t n_rounds) {
  alignas(32) static constexpr float kNumbers[8] = {};
  __m256 sum[kStarts] = {};
  __m256i bits[kLogical] = {};
  const __m256 a = _mm256_set1_ps(0.5f);
  for (int64_t round = 0; round < n_rounds; ++round)
    for (int i = 0; i < kStarts; ++i)
      __asm__ volatile("vfmadd231ps %2, %2, %0\n\tvpand %2, %1, %1\n\tvmovaps %3, %%ymm15"
                       : "+x"(sum[i]), "+x"(bits[i % kLogical])
                       : "x"(a), "m"(*reinterpret_cast<const __m256*>(kNumbers))
                       : "xmm15");
}

// Reads n_streams equal parts of the range alternately, each prefetching kAhead bytes ahead (0:
// none) into level 1, or with kLocality 2 into level 2.
template <int n_streams, int kAhead, int kLocality = 3>
void read(const void* from, int64_t bytes) {
  constexpr int kStep = 256;  // bytes per turn of a stream
  const auto* base = static_cast<const char*>(from);
  const int64_t part = bytes / n_streams;
  __m256i sum[4] = {};
  for (int64_t at = 0; at < part; at += kStep)
    for (int stream = 0; stream < n_streams; ++stream) {
      const char* p = base + stream * part + at;
      if constexpr (kAhead > 0)
        for (int line = 0; line < kStep; line += 64)
          __builtin_prefetch(p + kAhead + line, 0, kLocality);
      for (int i = 0; i < kStep / 32; ++i)
        sum[i % 4] = _mm256_xor_si256(
            sum[i % 4], _mm256_load_si256(reinterpret_cast<const __m256i*>(p + i * 32)));
    }
  for (__m256i& s : sum) __asm__ volatile("" : : "x"(s));
}

constexpr PeakLoop kPeaks[] = {
    {"vfmadd231ps ymm", Arithmetic::kF32, Feature::kAvx2, kChains * 8 * 2, fma_f32},
    {"vpmaddubsw + vpmaddwd + vpaddd ymm", Arithmetic::kInt8, Feature::kAvx2, kChains * 32 * 2,
     multiply_pairs_int8},
    {"8 vpmaddubsw + 7 vpaddw + vpmaddwd + vpaddd ymm", Arithmetic::kInt8, Feature::kAvx2,
     kNarrowChains* kNarrowProducts * 32 * 2, multiply_eight_pairs_int8},
    {"vpdpbusd ymm", Arithmetic::kInt8, Feature::kAvxVnni, kChains * 32 * 2, dot_int8},
};
constexpr ReadLoop kReads[] = {
    {"avx2", Feature::kAvx2, read<1, 0>},
    {"avx2, prefetch 4 KiB ahead", Feature::kAvx2, read<1, 4096>},
    {"avx2, prefetch 4 KiB ahead into level 2", Feature::kAvx2, read<1, 4096, 2>},
    {"avx2, 4 streams", Feature::kAvx2, read<4, 0>},
};

constexpr StartLoop kStart = {Feature::kAvx2, 3 * kStarts, start_mix};

}  // namespace

SpeedLoops avx2_speed_loops() {
  return {kPeaks, sizeof(kPeaks) / sizeof(PeakLoop), kReads, sizeof(kReads) / sizeof(ReadLoop),
          &kStart};
}

}  // namespace tandem::cpu
