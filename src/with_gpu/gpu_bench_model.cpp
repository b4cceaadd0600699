#include <algorithm>
#include <map>
#include <tuple>

#include "bench/gpu/gpu_benches.h"
#include "loader/gpu_model.h"
#include "offload/gpu/hybrid_experts.h"
#include "ops/cuda_device.h"
#include "ops/cuda_ops.h"
#include "ops/cuda_weights.h"

namespace tandem {
namespace {

class Shared final : public HybridBenchModel {
 public:
  struct Parts {
    const ModelConfig& config;
    const ModelWeights& weights;
    CudaExperts& on_gpu;
    CudaExpertRows& rows;
    gpu::Stream& stream;
  };
  Shared(const Parts& parts, CpuExperts& experts, ExpertPool& on_cpu, int max_tokens)
      : parts_(parts),
        experts_(experts),
        max_tokens_(max_tokens),
        hybrid_(parts.config,
                {.weights = parts.weights,
                 .on_gpu = parts.on_gpu,
                 .on_cpu = on_cpu,
                 .rows_on_cpu = experts.activations(),
                 .stream = parts.stream,
                 .team = &experts.team()},
                max_tokens) {}

  ExpertPool& experts() override { return hybrid_; }
  void micro_batches_from(int n_sequences) override {
    division_.micro_batches_from = n_sequences;
    hybrid_.divide(division_);
  }
  std::optional<int> measure_crossover(int max_tokens) override {
    if (!CudaStreaming::takes(experts_)) return {};
    division_ = {};
    hybrid_.divide(division_);
    streaming_ = std::make_unique<CudaStreaming>(parts_.config, experts_, parts_.rows, max_tokens_,
                                                 parts_.stream);
    streaming_->divide_by(streaming_->measured_rates(max_tokens));
    return hybrid_.measured_crossover(max_tokens, *streaming_);
  }
  void stream_from(int n_tokens) override {
    division_.stream_from = n_tokens;
    division_.streaming = streaming_.get();
    hybrid_.divide(division_);
  }
  int64_t bytes_streamed() const override { return streaming_->bytes_streamed(); }

 private:
  const Parts parts_;
  CpuExperts& experts_;
  const int max_tokens_;
  std::unique_ptr<CudaStreaming> streaming_;
  HybridExperts::Division division_;
  HybridExperts hybrid_;
};

class CudaBenchModel final : public GpuBenchModel {
 public:
  CudaBenchModel(const GpuBenchOptions& options, const gpu::GpuInfo& gpu_info, bool fp8_activations)
      : config_(options.config) {
    fill(options, gpu_info.free_bytes);
    const CudaLimits limits = {.max_tokens = options.max_tokens,
                               .context = options.context,
                               .n_multiprocessors = gpu_info.n_multiprocessors,
                               .bytes_per_second = gpu_info.bytes_per_second,
                               .fp8_activations = fp8_activations};
    ops_ = std::make_unique<CudaOps>(config_, limits, stream_);
    rows_ = std::make_unique<CudaExpertRows>(config_, options.max_tokens, stream_, fp8_activations);
    experts_ = std::make_unique<CudaExperts>(config_, weights_, *rows_, stream_);
  }

  const ModelWeights& weights() const override { return weights_; }
  Device& device() override { return device_; }
  Ops& ops() override { return *ops_; }
  ExpertPool& experts() override { return *experts_; }
  std::unique_ptr<HybridBenchModel> share(CpuExperts& experts, ExpertPool& on_cpu,
                                          int max_tokens) override {
    return std::make_unique<Shared>(Shared::Parts{config_, weights_, *experts_, *rows_, stream_},
                                    experts, on_cpu, max_tokens);
  }
  QuantView repeated(TensorView rows, int64_t n_rows) override;
  int n_nodes_of_last_step() const override { return device_.n_nodes_of_last_step(); }
  int n_early_of_last_step() const override { return device_.n_early_of_last_step(); }
  void to_gpu(TensorView from, TensorView to) override {
    check(from.stride == from.cols && to.stride == to.cols, "matrices without gaps");
    stream_.copy(from.data, from.rows * from.row_bytes(), to.data);
  }
  void wait() override { stream_.wait(); }

 private:
  void fill(const GpuBenchOptions& options, int64_t free_bytes);
  void fill_first(const QuantView& stored, WeightUse use, const QuantView& on_gpu);
  void copy(const TensorView& from, const TensorView& to) {
    stream_.copy(from.data, from.rows * from.stride * size_of(from.dtype), to.data);
  }

  const ModelConfig config_;
  gpu::Stream stream_;
  CudaDevice device_{stream_, true};
  CudaWeights home_;
  std::vector<std::unique_ptr<CudaWeights>> repeated_;
  ModelWeights weights_;
  std::unique_ptr<CudaOps> ops_;
  std::unique_ptr<CudaExpertRows> rows_;
  std::unique_ptr<CudaExperts> experts_;
};

QuantView CudaBenchModel::repeated(TensorView rows, int64_t n_rows) {
  check(rows.dtype == DType::kBF16 && rows.stride == rows.cols, "rows of BF16 without gaps");
  const QuantView all = {.q = {nullptr, n_rows, rows.cols, rows.cols, rows.dtype}, .scale = {}};
  CudaWeights& home = *repeated_.emplace_back(std::make_unique<CudaWeights>());
  home.allocate(CudaWeights::bytes_of(all, WeightUse::kAttention));
  const QuantView matrix = home.reserve(all, WeightUse::kAttention);
  for (int64_t first = 0; first < n_rows; first += rows.rows)
    home.upload_rows(rows.row_data(0), all, matrix, first, std::min(rows.rows, n_rows - first));
  home.finish();
  return matrix;
}

// Matrices of one shape and format are equal, as in the model on the CPU.
void CudaBenchModel::fill(const GpuBenchOptions& options, int64_t free_bytes) {
  for (const DType type : {options.formats.backbone.dtype, options.formats.experts.dtype})
    require(type != DType::kI8 && !is_i4(type), "GPU kernels do not support integer formats");
  RandomTensor random(options.formats, config_);
  int64_t bytes = 0;
  for_each_weight(weights_, config_, [&](const WeightSpec& spec, QuantView&) {
    if (options.wanted(spec)) bytes += CudaWeights::bytes_of(random.stored(spec), spec.use);
  });
  require(bytes + options.cache_bytes < free_bytes,
          "the GPU has {:.2f} GB free and weights and cache need {:.2f} GB", gigabytes(free_bytes),
          gigabytes(bytes + options.cache_bytes));
  home_.allocate(bytes);
  std::map<std::tuple<WeightUse, DType, int64_t, int64_t>, QuantView> firsts;
  for_each_weight(weights_, config_, [&](const WeightSpec& spec, QuantView& slot) {
    if (!options.wanted(spec)) return;
    const QuantView stored = random.stored(spec);
    slot = home_.reserve(stored, spec.use);
    const auto [first, is_first] =
        firsts.try_emplace({spec.use, stored.q.dtype, spec.rows, spec.cols}, slot);
    if (is_first) return fill_first(stored, spec.use, slot);
    copy(first->second.q, slot.q);
    if (!slot.scale.empty()) copy(first->second.scale, slot.scale);
  });
  if (config_.tied_head) weights_.head = weights_.embed;
  stream_.wait();
}

void CudaBenchModel::fill_first(const QuantView& stored, WeightUse use, const QuantView& on_gpu) {
  constexpr int64_t kRowsAtOnce = 256;
  const int64_t row_bytes = stored.q.row_bytes();
  std::vector<std::byte> rows(static_cast<size_t>(kRowsAtOnce * row_bytes));
  for (int64_t first = 0; first < stored.q.rows; first += kRowsAtOnce) {
    const int64_t n = std::min(kRowsAtOnce, stored.q.rows - first);
    RandomTensor::write_rows(stored, use, first, n, rows.data());
    home_.upload_rows(rows.data(), stored, on_gpu, first, n);
  }
  if (!on_gpu.scale.empty()) home_.upload_scales(stored.scale.row_data(0), stored, on_gpu);
  home_.finish();
}

}  // namespace

GpuBenchModels gpu_bench_models(bool fp8_activations) {
  if (!why_no_gpu().empty()) return {};
  return [fp8_activations](const GpuBenchOptions& options) -> std::unique_ptr<GpuBenchModel> {
    try {
      return std::make_unique<CudaBenchModel>(options, gpu::open_gpu(), fp8_activations);
    } catch (const Error&) {  // does not fit this GPU
      return nullptr;
    }
  };
}

}  // namespace tandem
