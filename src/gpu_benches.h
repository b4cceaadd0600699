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

}  // namespace tandem
