// The loops for any x86-64, and the list of all islands.
#include "cpu_kernels/peaks.h"

#include <immintrin.h>

namespace tandem::cpu {

SpeedLoops avx2_speed_loops();
SpeedLoops avx512_speed_loops();
SpeedLoops amx_speed_loops();

namespace {

constexpr int kChains = 8;

void multiply_add_sse(int64_t n_rounds) {
  __m128 sum[kChains] = {};
  const __m128 a = _mm_set1_ps(0.5f), b = _mm_set1_ps(0.25f);
  for (int64_t round = 0; round < n_rounds; ++round)
    for (__m128& s : sum)
      __asm__ volatile("movaps %1, %%xmm15\n\tmulps %2, %%xmm15\n\taddps %%xmm15, %0"
                       : "+x"(s)
                       : "x"(a), "x"(b)
                       : "xmm15");
}

void read_sse(const void* from, int64_t bytes) {
  const auto* at = static_cast<const __m128i*>(from);
  const __m128i* const end = at + bytes / static_cast<int64_t>(sizeof(__m128i));
  __m128i sum[4] = {};
  for (; at < end; at += 4)
    for (int i = 0; i < 4; ++i) sum[i] = _mm_xor_si128(sum[i], _mm_load_si128(at + i));
  for (__m128i& s : sum) __asm__ volatile("" : : "x"(s));
}

constexpr PeakLoop kPeaks[] = {
    {"mulps + addps xmm", Arithmetic::kF32, Feature::kBaseline, kChains * 8, multiply_add_sse},
};
constexpr ReadLoop kReads[] = {{"sse2", Feature::kBaseline, read_sse}};

}  // namespace

SpeedLoops speed_loops(int island) {
  switch (island) {
    case 0:
      return {kPeaks, 1, kReads, 1};
    case 1:
      return avx2_speed_loops();
    case 2:
      return avx512_speed_loops();
    default:
      return amx_speed_loops();
  }
}

}  // namespace tandem::cpu
