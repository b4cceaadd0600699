// What is measured of the card alone, for `tandem bench kernels`. src/with_gpu implements it;
// src/without_gpu takes its place where the program is built without CUDA.
#pragma once
#include "bench/kernels_bench.h"

namespace tandem {

// Small kernels of a model's shapes for up to most_tokens tokens; launches that follow one another
// walk through matrices of at least cold_bytes together, so that these come from memory. Empty
// where no GPU can be used.
SmallKernelTimer small_kernel_timer(const ModelConfig& config, int most_tokens, int64_t cold_bytes);

}  // namespace tandem
