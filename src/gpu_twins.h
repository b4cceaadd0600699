// What benchmarks time beside the CPU. src/with_gpu implements it; src/without_gpu takes its place
// where the program is built without CUDA.
#pragma once
#include "bench/gpu_twin.h"

namespace tandem {

// Empty where no GPU can be used.
GpuTwins gpu_twins();

}  // namespace tandem
