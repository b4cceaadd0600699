// Common parts of the AVX-512 tiles: clearing and adding sums, and prefetching.
#pragma once
#include <immintrin.h>

#include "cpu_kernels/panels.h"

namespace tandem::cpu {
namespace {

// Sixteen 32-bit lanes; GCC 12 keeps arrays of __m512i, which has 64-bit lanes, in memory.
using Integers = int __attribute__((vector_size(64)));

[[maybe_unused]] __m512 floats(__m512 v) { return v; }
[[maybe_unused]] __m512 floats(Integers v) { return _mm512_cvtepi32_ps((__m512i)v); }

// 16 BF16 numbers, at a multiple of 32 bytes, as floats.
[[maybe_unused]] __m512 floats(const bf16* from) {
  const __m256i bf16s = _mm256_load_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16s), 16));
}

template <int M, int N, class Vector>
void clear(Vector (&acc)[M][N]) {
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
    for (int p = 0; p < N; ++p) acc[i][p] = Vector{};
}

// Prefetch distance of one row, and of one tile of weights that are not widened: bytes of a panel.
constexpr int kNearAhead = 1024;

// kFetch of a tile is the number of panels that it fetches at each step, from panel b.fetch on; or
// this value: it reads widened steps, two per stored step, and fetches stored steps of two panels
// alternately.
constexpr int kTwoInTurns = -1;

template <int N, int kFetch>
void fetch_ahead(const Block& b, int panel, int s) {
  if constexpr (N == kGroup && kFetch == kTwoInTurns)
    fetch_weights(b.ahead[b.fetch + (s & 1)] + (s >> 1) * kStepBytes);
  if constexpr (N == kGroup)
#pragma GCC unroll 4
    for (int p = 0; p < kFetch; ++p) fetch_weights(b.ahead[b.fetch + p] + s * kStepBytes);
  if constexpr (N < kGroup && kFetch > 0) fetch_weights(b.ahead[panel] + s * kStepBytes);
}

// Fetches step s for a tile that widens: one step of each of its panels. Where two such tiles leave
// widened steps (kKeep), each fetches for one of the group's first two panels.
template <int N, bool kKeep>
void fetch_stored(const Block& b, int panel, int s) {
  if constexpr (kKeep && N == kGroup / 2) {
    fetch_weights(b.ahead[panel / 2] + s * kStepBytes);
  } else {
#pragma GCC unroll 4
    for (int p = panel; p < panel + N; ++p) fetch_weights(b.ahead[p] + s * kStepBytes);
  }
}

// Tiles of up to kNearRows rows fetch the step kNearBytes later into the level-1 cache: they are
// faster than the hardware prefetcher there.
constexpr int kNearRows = 4, kNearBytes = 16 * kStepBytes;

// What a pass of a tile over N panels fetches: at each step, N lines of the panels that the tile
// fetches, divided among its passes. Without such a line it fetches the one that it reads.
template <int N>
class FetchedLines {
 public:
  FetchedLines(const Block& b, int panel) {
    const bool whole = b.n_panels == kGroup;
    const int each = b.n_fetched * N <= kGroup ? 1 : b.n_fetched * N / kGroup;
    for (int l = 0; l < N; ++l) {
      const int line = panel / N * each + l;
      from_[l] = whole ? l < each && line < b.n_fetched ? b.ahead[b.fetch + line] : b.w[panel]
                 : b.fetch == 0 ? b.ahead[panel]
                                : b.w[panel];
    }
  }
  [[gnu::always_inline]] void fetch(int64_t offset) const {
#pragma GCC unroll 4
    for (int l = 0; l < N; ++l) fetch_weights(from_[l] + offset);
  }

 private:
  const char* from_[N];
};

template <int M, int N, class Vector>
void add_sums(const Vector (&acc)[M][N], const Block& b, int panel, int part, Sum* sums) {
  // Hides the address from GCC 12, which would keep all addresses in vector registers across parts.
  float* to = sums[0] + panel * kPanelRows;
  __asm__("" : "+r"(to));
#pragma GCC unroll 8
  for (int p = 0; p < N; ++p) {
    const __m512 scale = _mm512_loadu_ps(b.scale[panel + p] + part * kPanelRows);
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) {
      float* sum = to + i * kGroupRows + p * kPanelRows;
      _mm512_store_ps(sum, _mm512_fmadd_ps(floats(acc[i][p]), scale, _mm512_load_ps(sum)));
    }
  }
}

}  // namespace
}  // namespace tandem::cpu
