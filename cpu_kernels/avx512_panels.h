// What the AVX-512 tiles share: how they begin and how they end.
#pragma once
#include <immintrin.h>

#include "cpu_kernels/panels.h"

namespace tandem::cpu {
namespace {

// Sixteen 32-bit lanes; GCC 12 keeps arrays of __m512i, whose lanes have 64, in memory.
using Integers = int __attribute__((vector_size(64)));

[[maybe_unused]] __m512 floats(__m512 v) { return v; }
[[maybe_unused]] __m512 floats(Integers v) { return _mm512_cvtepi32_ps((__m512i)v); }

template <int M, int N, class Vector>
void clear(Vector (&acc)[M][N]) {
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
    for (int p = 0; p < N; ++p) acc[i][p] = Vector{};
}

template <int M, int N, class Vector>
void add_sums(const Vector (&acc)[M][N], const Block& b, int panel, Sum* sums) {
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
    for (int p = 0; p < N; ++p) {
      float* sum = sums[i] + (panel + p) * kPanelRows;
      _mm512_store_ps(sum, _mm512_fmadd_ps(floats(acc[i][p]), _mm512_load_ps(b.scale[panel + p]),
                                           _mm512_load_ps(sum)));
    }
}

}  // namespace
}  // namespace tandem::cpu
