// Read loops and peaks of AVX-512, with VNNI and BF16 where the CPU has them.
#include <immintrin.h>

#include "cpu_kernels/peaks.h"

namespace tandem::cpu {
namespace {

constexpr int kChains = 16;

// Assembly, because compilers would merge equal chains of intrinsics into one.
void fma_f32(int64_t n_rounds) {
  __m512 sum[kChains] = {};
  const __m512 a = _mm512_set1_ps(0.5f), b = _mm512_set1_ps(0.25f);
  for (int64_t round = 0; round < n_rounds; ++round)
    for (__m512& s : sum) __asm__ volatile("vfmadd231ps %1, %2, %0" : "+v"(s) : "v"(a), "v"(b));
}

void dot_bf16(int64_t n_rounds) {
  __m512 sum[kChains] = {};
  const __m512i a = _mm512_set1_epi16(0x3f3f), b = _mm512_set1_epi16(0x3e3e);
  for (int64_t round = 0; round < n_rounds; ++round)
    for (__m512& s : sum) __asm__ volatile("vdpbf16ps %1, %2, %0" : "+v"(s) : "v"(a), "v"(b));
}

void dot_int8(int64_t n_rounds) {
  __m512i sum[kChains] = {};
  const __m512i a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(5);
  for (int64_t round = 0; round < n_rounds; ++round)
    for (__m512i& s : sum) __asm__ volatile("vpdpbusd %1, %2, %0" : "+v"(s) : "v"(a), "v"(b));
}

// Half multiply-adds and half logical instructions, of each kStarts in a round: with 512 bits all
// of them share two pipes (Zen 5: four).
constexpr int kStarts = 12;

void start_mix(int64_t n_rounds) {
  __m512 sum[kStarts] = {};
  __m512i bits[kStarts] = {};
  const __m512 a = _mm512_set1_ps(0.5f);
  for (int64_t round = 0; round < n_rounds; ++round)
    for (int i = 0; i < kStarts; ++i)
      __asm__ volatile("vfmadd231ps %2, %2, %0\n\tvpandd %2, %1, %1"
                       : "+v"(sum[i]), "+v"(bits[i])
                       : "v"(a));
}

template <int n_streams, int kAhead, int kLocality = 3>
void read(const void* from, int64_t bytes) {
  constexpr int kStep = 256;  // bytes per turn of a stream
  const auto* base = static_cast<const char*>(from);
  const int64_t part = bytes / n_streams;
  __m512i sum[4] = {};
  for (int64_t at = 0; at < part; at += kStep)
    for (int stream = 0; stream < n_streams; ++stream) {
      const char* p = base + stream * part + at;
      for (int i = 0; i < kStep / 64; ++i) {
        if constexpr (kAhead > 0) __builtin_prefetch(p + kAhead + i * 64, 0, kLocality);
        sum[i] = _mm512_xor_si512(sum[i], _mm512_load_si512(p + i * 64));
      }
    }
  for (__m512i& s : sum) __asm__ volatile("" : : "v"(s));
}

constexpr PeakLoop kPeaks[] = {
    {"vfmadd231ps zmm", Arithmetic::kF32, Feature::kAvx512, kChains * 16 * 2, fma_f32},
    {"vdpbf16ps zmm", Arithmetic::kBF16, Feature::kAvx512Bf16, kChains * 32 * 2, dot_bf16},
    {"vpdpbusd zmm", Arithmetic::kInt8, Feature::kAvx512Vnni, kChains * 64 * 2, dot_int8},
};
constexpr ReadLoop kReads[] = {
    {"avx512", Feature::kAvx512, read<1, 0>},
    {"avx512, prefetch 4 KiB ahead", Feature::kAvx512, read<1, 4096>},
    {"avx512, prefetch 4 KiB ahead into level 2", Feature::kAvx512, read<1, 4096, 2>},
    {"avx512, 4 streams", Feature::kAvx512, read<4, 0>},
};

constexpr StartLoop kStart = {Feature::kAvx512, 2 * kStarts, start_mix};

}  // namespace

SpeedLoops avx512_speed_loops() {
  return {kPeaks, sizeof(kPeaks) / sizeof(PeakLoop), kReads, sizeof(kReads) / sizeof(ReadLoop),
          &kStart};
}

}  // namespace tandem::cpu
