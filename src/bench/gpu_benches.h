// Measurements of the GPU alone, for `tandem bench kernels`, `products` and `hybrid`. Implemented
// in src/with_gpu; src/without_gpu replaces it in builds without CUDA.
#pragma once
#include "bench/gpu_bench_model.h"
#include "bench/hybrid_bench.h"
#include "bench/kernels_bench.h"
#include "bench/products_bench.h"
#include "core/machine.h"

namespace tandem {

// Times small kernels with a model's shapes for up to max_tokens tokens. Consecutive launches
// cycle through matrices of at least cold_bytes in total, so that these come from memory. Empty if
// no GPU can be used.
SmallKernelTimer small_kernel_timer(const ModelConfig& config, int max_tokens, int64_t cold_bytes);

// Times products with weights of `format`, FP8 or BF16, and the same in BF16 with cuBLAS if
// available: `cublas` is set to its version, or to why it is missing. cuBLAS computes grouped
// products one expert after another. Empty if no GPU can be used.
ProductTimer product_timer(const ModelConfig& config, WeightFormat format, std::string& cublas);

// The cost of handing a layer's work to the CPU and back, each way measured for about `seconds`: 32
// layers of one small kernel with a hand-off to a CPU that answers at once, minus the same without.
// Throws Error when no GPU can be used.
HandOffs measured_hand_offs(double seconds);

// Idle seconds of the GPU between a kernel of a recorded graph and the next one, which waits for
// it: the time of one-thread kernels, extrapolated to length 0. Takes about `seconds`. Empty if
// noise exceeds the gap. Throws Error when no GPU can be used.
std::optional<double> measured_kernel_gap(double seconds);
// Consecutive kernels of `cycles` cycles that take `seconds` each; gap_between() extrapolates to 0
// cycles.
struct TimedKernels {
  double cycles, seconds;
};
double gap_between(TimedKernels shorter, TimedKernels longer);

// Bandwidth, peaks and copy rates of this machine's GPU. Implemented in src/with_gpu;
// src/without_gpu replaces it in builds without CUDA.
// Measures all fields except peaks of optional arithmetic, such as FP8: with that peak the planner
// would predict all products with FP8 weights. About `seconds` per rate. Throws Error when no GPU
// can be used.
Gpu measured_gpu(double seconds);
// Measures only memory bandwidth and the BF16 peak, the bounds of the GPU's kernels; with_fp8: also
// the FP8 peak, for kernels with FP8 activations.
Gpu measured_gpu_bounds(double seconds, bool with_fp8 = false);

// The GPU models that benchmarks time next to the CPU. Implemented in src/with_gpu; src/without_gpu
// replaces it in builds without CUDA.
// Empty if no GPU can be used. fp8_activations: as in GpuModelOptions.
GpuBenchModels gpu_bench_models(bool fp8_activations = false);

}  // namespace tandem
