// Bandwidth, peaks and copy rates of this machine's GPU. Implemented in src/with_gpu;
// src/without_gpu replaces it in builds without CUDA.
#pragma once
#include "core/machine.h"

namespace tandem {

// Measures all fields except peaks of optional arithmetic, such as FP8: with that peak the planner
// would predict all products with FP8 weights. About `seconds` per rate. Throws Error when no GPU
// can be used.
Gpu measured_gpu(double seconds);
// Measures only memory bandwidth and the BF16 peak, the bounds of the GPU's kernels; with_fp8: also
// the FP8 peak, for kernels with FP8 activations.
Gpu measured_gpu_bounds(double seconds, bool with_fp8 = false);

}  // namespace tandem
