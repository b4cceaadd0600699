// `tandem bench kernels`, `products` and `hybrid`, and what benchmarks measure of a GPU. Functions
// that run on the GPU (timers, measured_*, gpu_bench_models) are implemented in src/with_gpu;
// src/without_gpu replaces them in builds without CUDA.
#pragma once
#include "bench/benchmark.h"
#include "bench/gpu/hybrid_steps.h"

namespace tandem {

enum class SmallKernel : uint8_t {
  kEmbed,
  kNorm,       // of a sum
  kAppend,     // queries and keys rotated, latents normalised, the cache written
  kAppendFp8,  // the same for an FP8 cache
  kRoute,      // products with the experts' rows, and the choice
  kSortPairs,
  kGather,
  kRound,
  kCombine,
  kSiluMul,
  kAdd,
  kKernels
};
const char* name_of(SmallKernel kernel);
// Whether the model uses the kernel.
bool has(const ModelConfig& config, SmallKernel kernel);
// Bytes that the kernel must read and write for n_tokens tokens.
int64_t bytes_of(SmallKernel kernel, const ModelConfig& config, int64_t n_tokens);

// Seconds of one kernel among others of its kind in a recorded graph, measured for about `seconds`.
// Empty if its matrices do not fit in GPU memory.
using SmallKernelTimer =
    std::function<std::optional<double>(SmallKernel kernel, int n_tokens, double seconds)>;

// Times small kernels with a model's shapes for up to max_tokens tokens. Consecutive launches
// cycle through matrices of at least cold_bytes in total, so that these come from memory. Empty if
// no GPU can be used.
SmallKernelTimer small_kernel_timer(const ModelConfig& config, int max_tokens, int64_t cold_bytes);

// The rows, with times by `timer`, which is empty without a GPU (docs/gpu_benchmarks.md).
void bench_kernels(const BenchInput& bench, const SmallKernelTimer& timer, const OnRow& on_row);

// x w^T for one matrix of a model, or for n_experts matrices with equally many rows of x each.
struct ManyRowsProduct {
  enum class Kind : uint8_t { kDense, kGateUp, kDown };
  const char* what;
  Kind kind;
  int rows, cols;  // of w; for kGateUp of gate, and up has as many
  int n_experts = 1;
  int64_t n_weights() const {
    return int64_t{rows} * cols * n_experts * (kind == Kind::kGateUp ? 2 : 1);
  }
};
std::vector<ManyRowsProduct> products_of(const ModelConfig& config);

struct ProductTimes {
  std::optional<double> ours;                 // empty: too little GPU memory
  std::optional<double> cublas;               // empty: not available, or too little memory
  std::optional<double> cublas_grouped = {};  // all experts in one call; empty likewise
  std::string why_not_grouped = {};           // why it is not available
};
// Times for n rows of x per matrix, measured for about `seconds` each.
using ProductTimer =
    std::function<ProductTimes(const ManyRowsProduct& product, int n, double seconds)>;

// Times products with weights of `format`, FP8 or BF16, and the same in BF16 with cuBLAS if
// available: `cublas` is set to its version, or to why it is missing. cuBLAS computes grouped
// products one expert after another and, from 12.5 on, in one call. Empty if no GPU can be used.
// `libraries`: names of cuBLAS; empty: its usual names, and none for an emulated GPU.
ProductTimer product_timer(const ModelConfig& config, WeightFormat format, std::string& cublas,
                           std::span<const char* const> libraries = {});

// The rows, with times by `timer`. `cublas`: see product_timer().
void bench_products(const BenchInput& bench, const ProductTimer& timer, const std::string& cublas,
                    const OnRow& on_row);

// Seconds of a hand-off to the CPU and back: with the kernels of signals.h, as in the engine, and
// with the driver's stream memory operations (stream_flags.h); in a recorded graph, as in a decode
// step, and enqueued one by one.
struct HandOffs {
  struct Way {
    std::optional<double> recorded, enqueued;  // empty: refused
    std::string why_not = {};                  // the first refusal
  };
  Way kernels, memory_operations;
};

// The cost of handing a layer's work to the CPU and back, each way measured for about `seconds`: 32
// layers of one small kernel with a hand-off to a CPU that answers at once, minus the same without.
// Throws Error when no GPU can be used.
HandOffs measured_hand_offs(double seconds);

nlohmann::ordered_json hand_off_row(const HandOffs& measured, const std::string& gpu_name);

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

// `tandem bench hybrid`: steps shared by a GPU and the CPU.
struct HybridBench {
  BenchInput input;
  std::string gpu_name;                   // name of the GPU
  std::optional<Gpu> rates = {};          // for the prediction; empty: unknown
  std::function<void()> before_cpu = {};  // HybridSteps
  // Measured idle seconds between consecutive kernels of a recorded graph; empty: not measured.
  std::optional<double> kernel_gap = {};
};
// A report row of a measured decode step.
nlohmann::ordered_json decode_row(const HybridSteps::Decode& measured, const HybridBench& bench,
                                  const ModelConfig& config, int context, int n_sequences);
// Fields are listed in docs/gpu_benchmarks.md. Throws Error when host or GPU memory is
// insufficient.
nlohmann::ordered_json bench_hybrid(const HybridBench& bench, const cpu::KernelTable& kernels,
                                    MachineSpeed& speed);

// Bandwidth, peaks and copy rates of this machine's GPU, except peaks of optional arithmetic such
// as FP8: with that peak the planner would predict all products with FP8 weights. About `seconds`
// per rate. Throws Error when no GPU can be used.
Gpu measured_gpu(double seconds);
// Measures only memory bandwidth and the BF16 peak, the bounds of the GPU's kernels; with_fp8: also
// the FP8 peak, for kernels with FP8 activations.
Gpu measured_gpu_bounds(double seconds, bool with_fp8 = false);

// The GPU models that benchmarks time next to the CPU. Empty if no GPU can be used.
// fp8_activations: as in GpuModelOptions.
GpuBenchModels gpu_bench_models(bool fp8_activations = false);

}  // namespace tandem
