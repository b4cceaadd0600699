// The inner loop of BF16 products with AVX-512.
#pragma once
#include "cpu_kernels/avx512_panels.h"

namespace tandem::cpu {
namespace {

// acc[i][p] += x[i] . w at step s, two columns, for M rows and N panels. The columns of one step of
// x lie kXStep bytes after those of the one before.
template <int M, int N, int kXStep = 4>
void add_step(const char* const* x, const char* const* w, int s, __m512 (&acc)[M][N]) {
  __m512bh ws[N];
#pragma GCC unroll 8
  for (int p = 0; p < N; ++p) ws[p] = (__m512bh)_mm512_load_si512(w[p] + s * kStepBytes);
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i) {
    int pair;
    __builtin_memcpy(&pair, x[i] + s * kXStep, 4);
    const __m512bh xs = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 8
    for (int p = 0; p < N; ++p) acc[i][p] = _mm512_dpbf16_ps(acc[i][p], xs, ws[p]);
  }
}

template <int M, int N, int kXStep = 4>
void add_products(const char* const* x, const char* const* w, int n_steps, __m512 (&acc)[M][N]) {
  for (int s = 0; s < n_steps; ++s) add_step<M, N, kXStep>(x, w, s, acc);
}

}  // namespace
}  // namespace tandem::cpu
