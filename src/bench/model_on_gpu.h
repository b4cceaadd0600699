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
    if (!gpus || !(bench_model_ = gpus(options))) return;
    model_ = std::make_unique<StepRunner>(
        ModelParts{config_, bench_model_->weights(), bench_model_->device(), bench_model_->ops(),
                   bench_model_->experts()},
        limits, AttentionForm::kAuto);
    const int64_t bytes = KvCache::bytes_for(config_, cache_tokens, DType::kBF16);
    cache_ = std::make_unique<KvCache>(config_, cache_tokens, DType::kBF16,
                                       bench_model_->device().allocate(bytes));
    fill();
  }

  GpuBenchModel* bench_model() const { return bench_model_.get(); }
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
      bench_model_->to_gpu(padded_rows(made.layer(0)), padded_rows(cache_->layer(l)));
    bench_model_->wait();
  }

  const ModelConfig config_;
  std::unique_ptr<GpuBenchModel> bench_model_;
  std::unique_ptr<StepRunner> model_;
  std::unique_ptr<KvCache> cache_;
};

}  // namespace tandem
