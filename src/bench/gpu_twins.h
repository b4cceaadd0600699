// The GPU models that benchmarks time next to the CPU. Implemented in src/with_gpu; src/without_gpu
// replaces it in builds without CUDA.
#pragma once
#include "bench/gpu_twin.h"

namespace tandem {

// Empty if no GPU can be used. fp8_activations: as in GpuModelOptions.
GpuTwins gpu_twins(bool fp8_activations = false);

}  // namespace tandem
