// Byte products on 256-bit vectors, with VNNI and without: a block of columns is summed in exact
// integers (255 * 128 * 512 < 2^24), then scaled and added as float.
#pragma once
#include "cpu_kernels/avx2/lanes.h"
#include "cpu_kernels/panels.h"

namespace tandem::cpu {
namespace {

constexpr int kColumns = 512;    // summed in integers, as in every instruction set
constexpr int kI4Columns = 256;  // kI4 columns widened together
constexpr int kWideBytes = kColumns / 4 * kStepBytes;  // per panel

// Eight 32-bit lanes; GCC 12 keeps arrays of __m256i, which has 64-bit lanes, in memory.
using Integers = int __attribute__((vector_size(32)));

// Multipliers of eight rows, one per lane.
__m256i multipliers_of(const int8_t* of_rows) {
  return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(of_rows)));
}

// Four columns of a row, broadcast to every lane.
__m256i four_columns(const char* x) {
  int columns;
  __builtin_memcpy(&columns, x, 4);
  return _mm256_set1_epi32(columns);
}

template <int M, int N>
void add_sums(const Integers (&acc)[M][N][2], const Block& b, int panel, int part, Sum* sums) {
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
    for (int p = 0; p < N; ++p)
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        float* sum = sums[i] + (panel + p) * kPanelRows + h * 8;
        const __m256 scale = _mm256_loadu_ps(b.scale[panel + p] + part * kPanelRows + h * 8);
        const __m256 floats = _mm256_cvtepi32_ps((__m256i)acc[i][p][h]);
        _mm256_store_ps(sum, _mm256_fmadd_ps(floats, scale, _mm256_load_ps(sum)));
      }
}

}  // namespace
}  // namespace tandem::cpu
