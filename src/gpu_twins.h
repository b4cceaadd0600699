// What benchmarks time beside the CPU. src/with_gpu implements it; src/without_gpu takes its place
// where the program is built without CUDA.
#pragma once
#include "bench/gpu_twin.h"

namespace tandem {

// Empty where no GPU can be used. fp8_activations: as GpuModelOptions has it.
GpuTwins gpu_twins(bool fp8_activations = false);

}  // namespace tandem
