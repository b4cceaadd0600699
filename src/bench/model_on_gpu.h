// A benchmark's model on a GPU, with its forward pass and its cache.
#pragma once
#include "bench/gpu_bench_model.h"
#include "bench/random_cache.h"
#include "engine/step_runner.h"

namespace tandem {

class ModelOnGpu {
 public:
  // All pointers are null without a suitable GPU. The cache is filled with random numbers.
  ModelOnGpu(const GpuBenchModels& gpus, const GpuBenchOptions& options, StepLimits limits,
             int64_t cache_tokens)
      : config_(options.config) {
    if (!gpus || !(twin_ = gpus(options))) return;
    model_ = std::make_unique<StepRunner>(
        ModelParts{config_, twin_->weights(), twin_->device(), twin_->ops(), twin_->experts()},
        limits, AttentionForm::kAuto);
    const int64_t bytes = KvCache::bytes_for(config_, cache_tokens, DType::kBF16);
    cache_ = std::make_unique<KvCache>(config_, cache_tokens, DType::kBF16,
                                       twin_->device().allocate(bytes));
    fill();
  }

  GpuBenchModel* twin() const { return twin_.get(); }
  StepRunner* model() const { return model_.get(); }
  KvCache* cache() const { return cache_.get(); }

 private:
  // All layers get the same numbers.
  void fill() {
    ModelConfig one = config_;
    one.n_layers = 1;
    const TensorView first = cache_->layer(0);
    const KvCache made(one, first.rows, DType::kBF16);
    fill_with_random(made, one);
    for (int l = 0; l < config_.n_layers; ++l)
      twin_->to_gpu(whole_rows(made.layer(0)), whole_rows(cache_->layer(l)));
    twin_->wait();
  }

  const ModelConfig config_;
  std::unique_ptr<GpuBenchModel> twin_;
  std::unique_ptr<StepRunner> model_;
  std::unique_ptr<KvCache> cache_;
};

}  // namespace tandem
