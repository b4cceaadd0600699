// The routed experts of a worker that are on its GPU. Implemented in src/with_gpu; src/without_gpu
// replaces it in builds without CUDA, at link time.
#pragma once
#include <memory>
#include <string>

#include "core/progress_watch.h"
#include "io/load_jobs.h"
#include "io/weight_store.h"
#include "loader/weights/load_weights.h"
#include "offload/cpu_experts.h"
#include "offload/parts/fit.h"

namespace tandem {

class GpuExperts {
 public:
  virtual ~GpuExperts() = default;
  virtual const std::string& gpu_name() const = 0;
  // What decides the bits of their sums (WorkerWelcome::gpu_arithmetic).
  virtual std::string arithmetic() const = 0;
  // Whether rows are rounded to BF16 in all layers.
  virtual bool takes_bf16() const = 0;
  // Computes batches in host memory: these experts on the GPU, and the others by `others`, which
  // outlives the object. Called once.
  virtual ExpertPool& with(CpuExperts& others) = 0;
  // Whether a batch waits for the GPU, and how many have; for any thread.
  virtual WorkProgress progress() const = 0;
};

struct GpuExpertsOptions {
  int max_rows = 0;   // of a batch
  int n_threads = 1;  // that load
  LoadProgress progress = {};
};

// Memory of the GPU that would be used, and what experts take of it, for fit_gpu(): there is no
// backbone and no KV cache. `stored`: stored_weights(); it and `config` must outlive the result.
// Throws Error where there is no GPU, or none that takes the experts. Loads nothing.
GpuMemory gpu_expert_memory(ModelWeights& stored, const ModelConfig& config, int max_rows);

// Loads the experts of `parts`. `config` must outlive the result. Throws Error when no GPU can be
// used.
std::unique_ptr<GpuExperts> load_gpu_experts(const WeightStore& store, ModelWeights& stored,
                                             const ModelConfig& config,
                                             const GpuExpertsOptions& options,
                                             const GpuParts& parts);

}  // namespace tandem
