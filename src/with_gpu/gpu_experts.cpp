#include "loader/gpu_experts.h"

#include <algorithm>

#include "offload/gpu/cuda_served_experts.h"
#include "ops/cuda_device.h"
#include "ops/cuda_products.h"
#include "with_gpu/gpu_expert_slots.h"
#include "with_gpu/gpu_weights.h"

namespace tandem {
namespace {

class ExpertsOnGpu final : public GpuExperts {
 public:
  ExpertsOnGpu(const WeightStore& store, ModelWeights& stored, const ModelConfig& config,
               const GpuExpertsOptions& options, const GpuParts& parts)
      : config_(config),
        max_rows_(options.max_rows),
        gpu_info_(gpu::open_gpu()),
        weights_(weights_of_rank({}, parts)) {
    load(store, stored, options, parts);
    rows_ = std::make_unique<CudaExpertRows>(config_, max_rows_, stream_);
    experts_ = std::make_unique<CudaExperts>(config_, weights_, *rows_, stream_);
  }

  const std::string& gpu_name() const override { return gpu_info_.name; }
  // GPUs of one compute capability have the same tensor cores.
  std::string arithmetic() const override {
    return fmt::format("{} of compute capability {}.{}, experts as stored",
                       gpu_info_.emulated ? "emulated GPU" : "GPU", gpu_info_.major,
                       gpu_info_.minor);
  }
  bool takes_bf16() const override { return experts_->rounds_to_bf16(); }
  ExpertPool& with(CpuExperts& others) override {
    pool_ = std::make_unique<CudaServedExperts>(
        config_, CudaServedExperts::Parts{weights_, *experts_, others, stream_}, max_rows_);
    return *pool_;
  }
  WorkProgress progress() const override { return pool_ ? pool_->progress() : WorkProgress{}; }

 private:
  void load(const WeightStore& store, ModelWeights& stored, const GpuExpertsOptions& options,
            const GpuParts& parts) {
    store.require_unchanged();
    CudaWeights in_host;  // of the backbone, which is not here
    std::vector<LoadJob> jobs =
        upload_jobs({.stored = stored, .config = config_, .parts = parts, .only_experts = true},
                    weights_, home_, in_host);
    run_load_jobs(store.files(), std::move(jobs), {options.n_threads, options.progress});
    home_.finish();
  }

  const ModelConfig& config_;
  const int max_rows_;
  const gpu::GpuInfo gpu_info_;
  gpu::Stream stream_;
  CudaWeights home_;
  ModelWeights weights_;
  std::unique_ptr<CudaExpertRows> rows_;
  std::unique_ptr<CudaExperts> experts_;
  std::unique_ptr<CudaServedExperts> pool_;
};

}  // namespace

GpuMemory gpu_expert_memory(ModelWeights& stored, const ModelConfig& config, int max_rows) {
  CudaProducts::require_takes(config);
  const gpu::GpuInfo gpu_info = gpu::open_gpu();
  // Used by CUDA itself and its modules.
  const int64_t context_bytes = gpu_info.emulated ? 0 : CudaDevice::kContextBytes;
  return {.name = gpu_info.name,
          .free_bytes = gpu_info.free_bytes,
          .expert_bytes = std::max<int64_t>(1, GpuExpertSlots::bytes_for(stored, 1)),
          .streams = false,
          .weight_bytes =
              [&stored, &config](const GpuParts& parts) {
                return weight_bytes(
                    {.stored = stored, .config = config, .parts = parts, .only_experts = true},
                    Home::kGpu);
              },
          .other_bytes =
              [&config, max_rows, context_bytes](const GpuParts&, int64_t, int64_t) {
                return CudaExpertRows::bytes_for(config, max_rows) +
                       CudaServedExperts::bytes_for(config, max_rows) + context_bytes;
              }};
}

std::unique_ptr<GpuExperts> load_gpu_experts(const WeightStore& store, ModelWeights& stored,
                                             const ModelConfig& config,
                                             const GpuExpertsOptions& options,
                                             const GpuParts& parts) {
  return std::make_unique<ExpertsOnGpu>(store, stored, config, options, parts);
}

}  // namespace tandem
