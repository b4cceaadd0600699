#include "gpu_model.h"

#include <chrono>
#include <unordered_map>

#include "model/checkpoint.h"
#include "offload/cuda_experts.h"
#include "ops/cuda_ops.h"
#include "ops/cuda_weights.h"

namespace tandem {
namespace {

// Every tensor once; a tied head is the embedding, also on the card.
template <class Visit>
void for_each_pair(ModelWeights& stored, ModelWeights& on_card, const ModelConfig& config,
                   Visit visit) {
  std::unordered_map<std::string, QuantView> sources;
  for_each_weight(stored, config,
                  [&](const WeightSpec& spec, QuantView& w) { sources[spec.name] = w; });
  for_each_weight(on_card, config, [&](const WeightSpec& spec, QuantView& w) {
    visit(spec, sources.at(spec.name), w);
  });
  if (config.tied_head) on_card.head = on_card.embed;
}

int64_t weight_bytes(ModelWeights& stored, const ModelConfig& config) {
  int64_t bytes = 0;
  for_each_weight(stored, config, [&](const WeightSpec& spec, QuantView& w) {
    bytes += CudaWeights::bytes_of(w, spec.use);
  });
  return bytes;
}

class Loaded final : public GpuModel {
 public:
  Loaded(const WeightStore& store, ModelWeights& stored, const ModelConfig& config,
         const GpuModelOptions& options)
      : card_(gpu::open_card()) {
    require_room(stored, config, options);
    load(store, stored, config, options);
    ops_ = std::make_unique<CudaOps>(config, limits_of(options), stream_);
    experts_ = std::make_unique<CudaExperts>(config, weights_, options.max_tokens, stream_);
  }

  const std::string& card() const override { return card_.name; }
  const ModelWeights& weights() const override { return weights_; }
  const LoadReport& report() const override { return report_; }
  Ops& ops() override { return *ops_; }
  RoutedExperts& experts() override { return *experts_; }

 private:
  CudaLimits limits_of(const GpuModelOptions& options) const {
    return {options.max_tokens, options.context, card_.n_multiprocessors, options.records};
  }
  void require_room(ModelWeights& stored, const ModelConfig& config,
                    const GpuModelOptions& options) const;
  int64_t bytes_beside_weights(const ModelConfig& config, const GpuModelOptions& options) const;
  void load(const WeightStore& store, ModelWeights& stored, const ModelConfig& config,
            const GpuModelOptions& options);

  const gpu::Card card_;
  gpu::Stream stream_;
  CudaWeights home_;
  ModelWeights weights_;
  LoadReport report_;
  std::unique_ptr<CudaOps> ops_;
  std::unique_ptr<CudaExperts> experts_;
};

// Everything that a run allocates on the card, before the first byte is loaded.
void Loaded::require_room(ModelWeights& stored, const ModelConfig& config,
                          const GpuModelOptions& options) const {
  const int64_t weights = weight_bytes(stored, config);
  const int64_t needed = weights + bytes_beside_weights(config, options);
  if (needed <= card_.free_bytes) return;
  const auto fits = [&](int64_t context) {
    GpuModelOptions other = options;
    other.context = context;
    return weights + bytes_beside_weights(config, other) <= card_.free_bytes;
  };
  require(
      fits(kPageSize),
      "{} has {:.2f} GB free and {:.2f} GB are needed, {:.2f} GB of them weights, which do not fit "
      "with any --ctx: use a smaller model or --device cpu",
      card_.name, card_.free_bytes * 1e-9, needed * 1e-9, weights * 1e-9);
  int64_t low = 1, high = options.context / kPageSize + 1;  // pages that fit, and that do not
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (fits(middle * kPageSize) ? low : high) = middle;
  }
  fail(
      "{} has {:.2f} GB free and {:.2f} GB are needed, {:.2f} GB of them weights, the rest KV "
      "cache "
      "and scratch: --ctx {} would fit",
      card_.name, card_.free_bytes * 1e-9, needed * 1e-9, weights * 1e-9, low * kPageSize);
}

int64_t Loaded::bytes_beside_weights(const ModelConfig& config,
                                     const GpuModelOptions& options) const {
  constexpr int64_t kContextBytes = 300 << 20;  // what CUDA itself and its modules take
  return CudaOps::bytes_for(config, limits_of(options)) +
         CudaExperts::bytes_for(config, options.max_tokens) +
         DeepSeek::bytes_for(config, {options.max_tokens, options.max_logits}) +
         KvCache::bytes_for(config, options.context, DType::kBF16) +
         (card_.emulated ? 0 : kContextBytes);
}

// Reserves room for every tensor, then uploads pieces of them from all threads.
void Loaded::load(const WeightStore& store, ModelWeights& stored, const ModelConfig& config,
                  const GpuModelOptions& options) {
  store.require_unchanged();
  home_.allocate(weight_bytes(stored, config));
  std::vector<LoadJob> jobs;
  const auto add = [&](const std::byte* source, int64_t bytes, auto run) {
    jobs.push_back({source, bytes, run});
    report_.bytes += bytes;
  };
  for_each_pair(stored, weights_, config,
                [&](const WeightSpec& spec, QuantView from, QuantView& to) {
                  to = home_.reserve(from, spec.use);
                  const int64_t at_once = rows_per_load_job(from.q.row_bytes());
                  for (int64_t first = 0; first < from.q.rows; first += at_once) {
                    const int64_t n = std::min(at_once, from.q.rows - first);
                    add(from.q.row_data(first), n * from.q.row_bytes(),
                        [this, from, to, first, n](const std::byte* data) {
                          home_.upload_rows(data, from, to, first, n);
                        });
                  }
                  if (to.scale.empty()) return;
                  add(from.scale.row_data(0), from.scale.rows * from.scale.row_bytes(),
                      [this, from, to, name = spec.name](const std::byte* data) {
                        TensorView scales = from.scale;
                        scales.data = const_cast<std::byte*>(data);
                        check_scales(name + "_scale_inv", scales);
                        home_.upload_scales(data, to);
                      });
                });
  const auto start = std::chrono::steady_clock::now();
  run_load_jobs(store.files(), std::move(jobs), {options.n_threads, options.progress});
  home_.finish();
  report_.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

std::string why_no_gpu() {
  try {
    gpu::open_card();
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

std::unique_ptr<GpuModel> load_gpu_model(const WeightStore& store, ModelWeights& stored,
                                         const ModelConfig& config,
                                         const GpuModelOptions& options) {
  return std::make_unique<Loaded>(store, stored, config, options);
}

}  // namespace tandem
