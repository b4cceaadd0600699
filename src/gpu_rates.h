// How fast the GPU of this machine reads, multiplies and copies. src/with_gpu implements it;
// src/without_gpu takes its place where the program is built without CUDA.
#pragma once
#include "core/machine.h"

namespace tandem {

// All fields but peaks in which no kernel of this program multiplies unless asked to, as FP8, by
// which the planner would predict all products with FP8 weights. About `seconds` each. Throws
// Error when no GPU can be used.
Gpu measured_gpu(double seconds);
// Only its reading and its BF16 peak, which the card's kernels are held against; with_fp8, for
// those with activations in FP8, also that of FP8.
Gpu measured_gpu_bounds(double seconds, bool with_fp8 = false);

}  // namespace tandem
