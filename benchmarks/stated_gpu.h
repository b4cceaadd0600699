// A GPU that is a delay: every verb takes as long as its weights, or its cache, need at the rates
// of a data sheet, and computes nothing but a made-up choice of experts. The forward pass, the
// experts on the CPU and the hand-off to them are the real ones; the emulated GPU's stream
// stands for the GPU.
#pragma once
#include <immintrin.h>
#include <pthread.h>

#include <chrono>
#include <map>
#include <random>

#include "bench/gpu_bench_model.h"
#include "bench/random_inputs.h"
#include "offload/gpu/hybrid_experts.h"

namespace tandem {

struct StatedRates {
  double bytes_per_second, ops_per_second;
  double slower = 1;  // times as slow as that

  double seconds(double bytes, double ops) const {
    return slower * std::max(bytes / bytes_per_second, ops / ops_per_second);
  }
};

class StatedOps final : public Ops {
 public:
  StatedOps(const ModelConfig& config, const ModelWeights& weights, StatedRates rates,
            int max_tokens, gpu::Stream& stream)
      : c_(config), w_(weights), rates_(rates), stream_(stream) {
    std::mt19937 rng(1);
    for (int i = 0; i < kChoices * config.n_layers; ++i)
      choices_.emplace_back(config.router, max_tokens, false, rng);
  }

  void begin(const Batch& batch) override { choice_ = batch.tokens[0] % kChoices; }
  void embed(std::span<const int32_t>, const QuantView&, TensorView) override {}
  void rms_norm(TensorView, const QuantView&, float, TensorView) override {}
  void add(TensorView, TensorView) override {}
  void clear(TensorView) override {}
  void rope(TensorView, std::span<const int32_t>, const RopeTable&) override {}
  void silu_mul(TensorView, TensorView) override {}
  void gather_rows(TensorView, std::span<const int32_t>, TensorView) override {}
  void append_kv(const Batch& part, TensorView, TensorView) override {
    first_row_ = part.first_row();
  }
  void linear(TensorView x, const QuantView& w, TensorView) override {
    product(x.rows, w.q.rows, w);
  }
  void linear_per_head(const LinearPerHead& a) override {
    product(a.x.rows / a.n_heads, a.n_heads * (a.transposed ? a.x.cols : a.out.cols), a.w);
  }
  void mla_absorbed(const MlaArgs& a) override {
    double tokens = 0;
    for (const Sequence& s : a.sequences) tokens += s.kv_length;
    const double ops = 2. * a.mla.n_heads * (2. * a.mla.kv_rank + a.mla.rope_dim);
    busy(tokens * static_cast<double>(a.cache.cols) * sizeof(uint16_t), tokens * ops);
  }
  void mla_naive(const MlaArgs&, const QuantView&) override { fail("the stated GPU only decodes"); }
  // Chooses what was recorded, by the step's first token and the layer.
  void route(const RouteArgs& a) override {
    product(a.x.rows, a.w.q.rows, a.w);
    int layer = 0;
    while (&w_.layers[layer].router != &a.w) ++layer;
    stream_.run_on_host([this, layer, first = first_row_, out = a.out] {
      const Routing chosen = choices_[choice_ * c_.n_layers + layer].routing();
      for (int64_t t = 0; t < out.ids.rows; ++t) {
        std::copy_n(chosen.ids.row<int32_t>(first + t), out.ids.cols, out.ids.row<int32_t>(t));
        std::copy_n(chosen.weights.row<float>(first + t), out.ids.cols, out.weights.row<float>(t));
      }
    });
  }

 private:
  static constexpr int kChoices = 8;

  void product(int64_t tokens, int64_t rows, const QuantView& w) {
    const int64_t blocks = w.scale.rows * w.scale.cols * rows / w.q.rows;
    busy(static_cast<double>(rows * w.q.row_bytes() + blocks * int64_t{sizeof(float)}),
         2. * static_cast<double>(tokens * rows * w.q.cols));
  }
  // The thread of the stream has a core of its own: asleep it would wake too late.
  void busy(double bytes, double ops) {
    const std::chrono::duration<double> seconds(rates_.seconds(bytes, ops));
    stream_.run_on_host([seconds] {
      const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(seconds);
      while (Clock::now() < end) _mm_pause();
    });
  }

  const ModelConfig& c_;
  const ModelWeights& w_;
  const StatedRates rates_;
  gpu::Stream& stream_;
  std::vector<RandomRouting> choices_;
  int choice_ = 0, first_row_ = 0;
};

// Its memory is the host's; it copies nothing.
class StatedDevice final : public Device {
 public:
  explicit StatedDevice(gpu::Stream& stream) : stream_(stream) {}
  Buffer allocate(int64_t bytes) override { return Buffer(bytes); }
  void copy(const void*, int64_t, void*) override {}
  void wait() override { stream_.wait(); }
  void to_host(TensorView, TensorView) override { wait(); }
  // As CudaDevice.
  bool run_recorded(const RecordKey& key, const std::function<void()>& enqueue,
                    const std::function<void()>& follow) override {
    if (key.n_tokens > gpu::kSkinnyTokens) {
      enqueue();
      return false;
    }
    auto known = recorded_.find(key);
    const bool is_new = known == recorded_.end();
    if (is_new) known = recorded_.emplace(key, stream_.capture(enqueue)).first;
    stream_.replay(known->second);
    follow();
    return is_new;
  }

 private:
  gpu::Stream& stream_;
  std::map<RecordKey, gpu::Graph> recorded_;
};

// Plays on `cpu`: its thread would otherwise inherit the core of the team's thread that makes it.
// Traces all steps that it shares.
class StatedGpu final : public GpuBenchModel {
 public:
  StatedGpu(const GpuBenchOptions& options, StatedRates rates, int cpu, Timeline& timeline)
      : config_(options.config), timeline_(timeline) {
    stream_.run_on_host([cpu] {
      cpu_set_t one;
      CPU_ZERO(&one);
      CPU_SET(cpu, &one);
      check(pthread_setaffinity_np(pthread_self(), sizeof one, &one) == 0, "a core for the GPU");
    });
    stream_.wait();
    RandomTensor shapes(options.formats, config_);
    for_each_weight(weights_, config_, [&](const WeightSpec& spec, QuantView& slot) {
      if (options.wanted(spec)) slot = shapes.stored(spec);
    });
    ops_ = std::make_unique<StatedOps>(config_, weights_, rates, options.max_tokens, stream_);
    rows_ = std::make_unique<CudaExpertRows>(config_, 0, stream_);
    none_ = std::make_unique<CudaExperts>(config_, weights_, *rows_, stream_);
  }

  const ModelWeights& weights() const override { return weights_; }
  Device& device() override { return device_; }
  Ops& ops() override { return *ops_; }
  ExpertPool& experts() override { return *none_; }
  std::unique_ptr<HybridBenchModel> share(CpuExperts& experts, ExpertPool& on_cpu,
                                          int max_tokens) override {
    auto shared =
        std::make_unique<Shared>(config_,
                                 HybridExperts::Parts{.weights = weights_,
                                                      .on_gpu = *none_,
                                                      .on_cpu = on_cpu,
                                                      .rows_on_cpu = experts.activations(),
                                                      .stream = stream_},
                                 max_tokens);
    shared->hybrid.record(timeline_);
    return shared;
  }
  QuantView repeated(TensorView, int64_t) override { fail("a stated GPU has no memory"); }
  int n_nodes_of_last_step() const override { return 0; }
  int n_early_of_last_step() const override { return 0; }
  void to_gpu(TensorView, TensorView) override {}
  void wait() override { stream_.wait(); }

 private:
  struct Shared final : HybridBenchModel {
    Shared(const ModelConfig& config, const HybridExperts::Parts& parts, int max_tokens)
        : hybrid(config, parts, max_tokens) {}
    ExpertPool& experts() override { return hybrid; }
    void micro_batches_from(int n) override { hybrid.divide({.micro_batches_from = n}); }
    std::optional<int> measure_crossover(int) override { return {}; }
    void stream_from(int) override {}
    int64_t bytes_streamed() const override { return 0; }
    HybridExperts hybrid;
  };

  const ModelConfig config_;
  Timeline& timeline_;
  gpu::Stream stream_;
  StatedDevice device_{stream_};
  ModelWeights weights_;
  std::unique_ptr<StatedOps> ops_;
  std::unique_ptr<CudaExpertRows> rows_;
  std::unique_ptr<CudaExperts> none_;
};

}  // namespace tandem
