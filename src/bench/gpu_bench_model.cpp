#include "bench/gpu_bench_model.h"

#include <algorithm>

#include "bench/machine/machine_speed.h"

namespace tandem {

TensorView on_gpu(GpuBenchModel& bench_model, TensorView from, std::vector<Buffer>& memory) {
  memory.push_back(
      bench_model.device().allocate(Arena::padded_bytes(from.rows * from.row_bytes())));
  TensorView to = from;
  to.data = memory.back().data();
  bench_model.to_gpu(padded_rows(from), padded_rows(to));
  bench_model.wait();
  return to;
}

ModelOnGpu::ModelOnGpu(const GpuBenchModels& gpus, const GpuBenchOptions& options,
                       StepLimits limits, int64_t cache_tokens)
    : config_(options.config) {
  const int64_t bytes = KvCache::bytes_for(config_, cache_tokens, DType::kBF16);
  GpuBenchOptions with_cache = options;
  with_cache.cache_bytes = bytes;
  if (!gpus || !(bench_model_ = gpus(with_cache))) return;
  model_ = std::make_unique<StepRunner>(
      ModelParts{config_, bench_model_->weights(), bench_model_->device(), bench_model_->ops(),
                 bench_model_->experts()},
      limits, AttentionForm::kAuto);
  cache_ = std::make_unique<KvCache>(config_, cache_tokens, DType::kBF16,
                                     bench_model_->device().allocate(bytes));
  fill();
}

// All layers get the same numbers.
void ModelOnGpu::fill() {
  ModelConfig one = config_;
  one.n_layers = 1;
  const TensorView first = cache_->layer(0);
  const KvCache made(one, first.rows, DType::kBF16);
  fill_with_random(made, one);
  for (int l = 0; l < config_.n_layers; ++l)
    bench_model_->to_gpu(padded_rows(made.layer(0)), padded_rows(cache_->layer(l)));
  bench_model_->wait();
}

double seconds_on_gpu(GpuBenchModel& bench_model, const std::function<void(int64_t run)>& run,
                      double seconds) {
  return seconds_of_runs(
      run, [&] { bench_model.wait(); }, seconds);
}

double seconds_of_runs(const std::function<void(int64_t run)>& run,
                       const std::function<void()>& wait, double seconds) {
  constexpr int kMinRounds = 3;
  constexpr double kShortestTiming = 1e-3;
  int64_t n_runs = 0, repeats = 1;
  const auto time = [&] {
    return seconds_of([&] {
             for (int64_t i = 0; i < repeats; ++i) run(n_runs++);
             wait();
           }) /
           static_cast<double>(repeats);
  };
  time();  // warm-up
  repeats = std::max<int64_t>(1, static_cast<int64_t>(kShortestTiming / time()));
  std::vector<double> times;
  double spent = 0;
  while (std::ssize(times) < kMinRounds || spent < seconds) {
    times.push_back(time());
    spent += times.back() * static_cast<double>(repeats);
  }
  return median(times);
}

}  // namespace tandem
