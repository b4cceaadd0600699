// A copy of a benchmark's model on a GPU, with the same shapes and formats, so that the same
// operations can be timed there. Implemented in src/with_gpu.
#pragma once
#include <functional>
#include <memory>
#include <optional>

#include "bench/bench_model.h"
#include "bench/random_inputs.h"
#include "engine/step_runner.h"
#include "offload/cpu_experts.h"
#include "ops/device.h"
#include "ops/ops.h"

namespace tandem {

// Routed experts in host memory that the CPU computes in the GPU model's steps (HybridExperts),
// with the settings that a benchmark varies.
class HybridBenchModel {
 public:
  virtual ~HybridBenchModel() = default;
  virtual ExpertPool& experts() = 0;
  // Decode steps of at least so many sequences run as two micro-batches; 0: none.
  virtual void micro_batches_from(int n_sequences) = 0;
  // Prepares to stream experts to the GPU in steps of up to max_tokens, and measures the rates.
  // Returns the number of tokens from which streaming is faster, 0: never; empty if their format
  // cannot be streamed.
  virtual std::optional<int> measure_crossover(int max_tokens) = 0;
  // Sets the threshold in tokens for streaming, 0: never; call after measure_crossover().
  virtual void stream_from(int n_tokens) = 0;
  virtual int64_t bytes_streamed() const = 0;  // bytes streamed so far
};

class GpuBenchModel {
 public:
  virtual ~GpuBenchModel() = default;
  virtual const ModelWeights& weights() const = 0;
  virtual Device& device() = 0;
  virtual Ops& ops() = 0;
  virtual ExpertPool& experts() = 0;
  // The routed experts of all layers, none on the GPU. `on_cpu` receives what is submitted to
  // `experts`; all must outlive the result. For steps of up to max_tokens.
  virtual std::unique_ptr<HybridBenchModel> share(CpuExperts& experts, ExpertPool& on_cpu,
                                                  int max_tokens) = 0;
  // A BF16 matrix of n_rows rows on the GPU that repeats the given rows.
  virtual QuantView repeated(TensorView rows, int64_t n_rows) = 0;
  // Kernels and copies in the graph of the last step; 0 if it was not recorded.
  virtual int n_nodes_of_last_step() const = 0;
  virtual int n_early_of_last_step() const = 0;  // those that may start early
  // Starts to copy a matrix with contiguous rows to the GPU.
  virtual void to_gpu(TensorView from, TensorView to) = 0;
  virtual void wait() = 0;
};

struct GpuBenchOptions {
  ModelConfig config;
  WeightFormats formats;
  std::function<bool(const WeightSpec&)> wanted;  // tensors to load; the others stay empty
  int max_tokens = 1;                             // per step
  int64_t context = 1;                            // tokens per sequence
  int64_t cache_bytes = 0;                        // of the cache that the GPU must hold as well
};
// Returns null without a GPU, or if it lacks memory or a format.
using GpuBenchModels = std::function<std::unique_ptr<GpuBenchModel>(const GpuBenchOptions&)>;

// The matrix extended to its stride, including the padding between rows; it must begin at column 0.
inline TensorView padded_rows(TensorView m) {
  m.cols = m.stride;
  return m;
}
// Copies a matrix with whole rows from the host to the GPU; `memory` owns the copy.
TensorView on_gpu(GpuBenchModel& bench_model, TensorView from, std::vector<Buffer>& memory);

// Routings of steps, in GPU memory.
class RoutingsOnGpu {
 public:
  RoutingsOnGpu(GpuBenchModel& bench_model, std::span<const RandomRouting> steps) {
    for (const RandomRouting& step : steps) {
      const Routing r = step.routing();
      routings_.push_back(
          {on_gpu(bench_model, r.ids, memory_), on_gpu(bench_model, r.weights, memory_)});
    }
  }
  const Routing& of_run(int64_t run) const { return routings_[run % std::ssize(routings_)]; }

 private:
  std::vector<Buffer> memory_;
  std::vector<Routing> routings_;
};

// A model on a GPU with its forward pass and its cache.
class ModelOnGpu {
 public:
  // All pointers are null without a suitable GPU. The cache is filled with random numbers.
  ModelOnGpu(const GpuBenchModels& gpus, const GpuBenchOptions& options, StepLimits limits,
             int64_t cache_tokens);

  GpuBenchModel* bench_model() const { return bench_model_.get(); }
  StepRunner* model() const { return model_.get(); }
  KvCache* cache() const { return cache_.get(); }

 private:
  void fill();

  const ModelConfig config_;
  std::unique_ptr<GpuBenchModel> bench_model_;
  std::unique_ptr<StepRunner> model_;
  std::unique_ptr<KvCache> cache_;
};

// Median seconds of a run. Runs are timed in groups of at least a millisecond, for about `seconds`.
double seconds_on_gpu(GpuBenchModel& bench_model, const std::function<void(int64_t run)>& run,
                      double seconds);
// Likewise, for work that is done when `wait` returns.
double seconds_of_runs(const std::function<void(int64_t run)>& run,
                       const std::function<void()>& wait, double seconds);

}  // namespace tandem
