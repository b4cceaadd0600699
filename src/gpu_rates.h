// How fast the GPU of this machine reads, multiplies and copies. src/with_gpu implements it;
// src/without_gpu takes its place where the program is built without CUDA.
#pragma once
#include "core/machine.h"

namespace tandem {

// All fields but peaks in which no kernel of this program multiplies. About `seconds` each. Throws
// Error when no GPU can be used.
Gpu measured_gpu(double seconds);
// Only its reading and its BF16 peak, which the card's kernels are held against.
Gpu measured_gpu_bounds(double seconds);

}  // namespace tandem
