// What is measured of the card alone, for `tandem bench kernels`, `products` and `hybrid`.
// src/with_gpu implements it; src/without_gpu takes its place where the program is built without
// CUDA.
#pragma once
#include "bench/hybrid_bench.h"
#include "bench/kernels_bench.h"
#include "bench/products_bench.h"

namespace tandem {

// Small kernels of a model's shapes for up to most_tokens tokens; launches that follow one another
// walk through matrices of at least cold_bytes together, so that these come from memory. Empty
// where no GPU can be used.
SmallKernelTimer small_kernel_timer(const ModelConfig& config, int most_tokens, int64_t cold_bytes);

// Products with weights of `format`, FP8 or BF16, and the same in BF16 by cuBLAS, where the machine
// has that: `cublas` becomes its version, or why not. Of grouped products cuBLAS computes one
// expert's after the other. Empty where no GPU can be used.
ProductTimer product_timer(const ModelConfig& config, WeightFormat format, std::string& cublas);

// What handing a layer's work to the CPU and back costs, each way for about `seconds`: 32 layers of
// one small kernel with a hand-off to a CPU that answers at once, less the same without. Throws
// Error when no GPU can be used.
HandOffs measured_hand_offs(double seconds);

// Seconds in which the card does nothing between a kernel of a recorded graph and the one that
// waits for it: what is left of kernels of one thread when their length goes to 0. About `seconds`.
// Nothing: noise was more. Throws Error when no GPU can be used.
std::optional<double> measured_kernel_gap(double seconds);
// That of kernels of so many cycles, of which one after the other takes so many seconds.
struct TimedKernels {
  double cycles, seconds;
};
double gap_between(TimedKernels shorter, TimedKernels longer);

}  // namespace tandem
