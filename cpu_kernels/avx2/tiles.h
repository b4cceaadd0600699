// Sums of a tile in registers, for the AVX2 kernel files that multiply float.
#pragma once
#include "cpu_kernels/avx2/lanes.h"

namespace tandem::cpu {
namespace {

// Calls f(Index<0>), .., f(Index<N - 1>): indices known to the compiler before it decides which
// arrays stay in registers.
template <int I>
struct Index {
  constexpr operator int() const { return I; }
};
template <int N, class F>
[[gnu::always_inline]] inline void each(F f) {
  if constexpr (N > 0) {
    each<N - 1>(f);
    f(Index<N - 1>{});
  }
}

// sum += x * w. Assembly, because GCC 12 otherwise moves and spills the sums of a tile.
[[gnu::always_inline]] inline void multiply_add(__m256& sum, __m256 x, __m256 w) {
  __asm__ volatile("vfmadd231ps %1, %2, %0" : "+x"(sum) : "x"(w), "x"(x));
}

}  // namespace
}  // namespace tandem::cpu
