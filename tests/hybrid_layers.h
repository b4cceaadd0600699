// A layer's experts on the GPU, real or emulated, and on the CPU, and a reference on the CPU alone.
#pragma once
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <map>

#include "offload/gpu/hybrid_experts.h"
#include "ops/cuda_weights.h"
#include "tests/check_close.h"
#include "tests/gpu_buffers.h"
#include "tests/random_model.h"

namespace tandem::test {

constexpr int kLayers = 4, kMaxTokens = 6, kActive = 3, kExperts = 8;

inline ModelConfig hand_off_config() {
  ModelConfig c;
  c.dim = 128;
  c.vocab = 8;
  c.n_layers = kLayers;
  c.n_dense_layers = 1;
  c.dense_dim = 32;
  c.expert_dim = 128;
  c.scale_block = 128;
  c.mla = {.n_heads = 1, .q_rank = 0, .kv_rank = 8, .nope_dim = 8, .rope_dim = 8, .v_dim = 8};
  c.router.n_experts = kExperts;
  c.router.n_active = kActive;
  c.router.n_groups = c.router.n_active_groups = 1;
  return c;
}

// Calls `before` ahead of the CPU's experts, to count, delay or fail. If `elsewhere`, it has a
// ticket for each micro-batch, as workers have, whose experts are computed when their sum is added,
// after a call of `before_sum`.
class Interposed final : public ExpertPool {
 public:
  explicit Interposed(ExpertPool& experts) : experts_(experts) {}
  bool waits(Ticket) override { return elsewhere; }
  void add_to(Ticket ticket, TensorView y) override {
    if (elsewhere) {
      if (before_sum) before_sum(ticket);
      ticket = experts_.submit(batches_[ticket]);
    }
    experts_.add_to(ticket, y);
  }

  std::function<void()> before;
  bool elsewhere = false;
  std::function<void(Ticket)> submitted, before_sum;

 private:
  Ticket start(const ExpertBatch& batch) override {
    if (before) before();
    if (!elsewhere) return experts_.submit(batch);
    batches_[batch.micro_batch] = batch;
    if (submitted) submitted(batch.micro_batch);
    return batch.micro_batch;
  }

  ExpertPool& experts_;
  std::array<ExpertBatch, kMaxTickets> batches_ = {};
};

// Layer 1 has experts on both devices, layer 2 only on the CPU, layer 3 only on the GPU.
inline std::vector<std::vector<bool>> on_gpu() {
  std::vector<bool> some(kExperts);
  for (int e = 0; e < kExperts; ++e) some[e] = e % 3 == 1;
  return {{}, some, std::vector<bool>(kExperts, false), std::vector<bool>(kExperts, true)};
}

class HybridHandOff : public testing::Test {
 protected:
  HybridHandOff() : HybridHandOff(DType::kBF16, {}) {}
  HybridHandOff(DType stored, ExpertsLayout layout)
      : random_(hand_off_config(), stored), whole_(kernels_), part_(kernels_) {
    all_ = reserve_packed(random_.stored, random_.config, whole_, layout);
    run_jobs(all_, whole_);
    layout.keep_elsewhere({on_gpu()});
    some_ = reserve_packed(random_.stored, random_.config, part_, layout);
    run_jobs(some_, part_);
    upload();
    cpu_ = std::make_unique<CpuExperts>(kernels_, random_.config, some_.weights, kMaxTokens, team_);
    reference_ =
        std::make_unique<CpuExperts>(kernels_, random_.config, all_.weights, kMaxTokens, team_);
    interposed_ = std::make_unique<Interposed>(*cpu_);
    rows_ = std::make_unique<CudaExpertRows>(random_.config, kMaxTokens, stream_);
    gpu_experts_ = std::make_unique<CudaExperts>(random_.config, gpu_weights_, *rows_, stream_);
  }
  void SetUp() override {
    const std::string why_not = gpu::why_no_hand_off(stream_);
    if (!why_not.empty()) GTEST_SKIP() << why_not;
    hybrid_ =
        std::make_unique<HybridExperts>(random_.config,
                                        HybridExperts::Parts{.weights = gpu_weights_,
                                                             .on_gpu = *gpu_experts_,
                                                             .on_cpu = *interposed_,
                                                             .rows_on_cpu = cpu_->activations(),
                                                             .stream = stream_,
                                                             .patience = patience_},
                                        kMaxTokens);
  }

  void upload() {
    const std::vector<std::vector<bool>> here = on_gpu();
    const auto for_each = [&](auto visit) {
      for_each_weight(gpu_weights_, random_.config, [&](const WeightSpec& spec, QuantView& slot) {
        if (spec.use == WeightUse::kExpert && here[spec.layer][spec.expert]) visit(spec, slot);
      });
    };
    std::map<std::string, QuantView> stored;
    for_each_weight(random_.stored, random_.config,
                    [&](const WeightSpec& spec, QuantView& w) { stored[spec.name] = w; });
    int64_t bytes = 0;
    for_each([&](const WeightSpec& spec, QuantView&) {
      bytes += CudaWeights::bytes_of(stored.at(spec.name), spec.use);
    });
    home_.allocate(bytes);
    for_each([&](const WeightSpec& spec, QuantView& slot) {
      const QuantView& from = stored.at(spec.name);
      slot = home_.reserve(from, spec.use);
      home_.upload_rows(from.q.row_data(0), from, slot, 0, from.q.rows);
      if (!slot.scale.empty()) home_.upload_scales(from.scale.row_data(0), from, slot);
    });
    home_.finish();
  }

  // Runs one layer with random rows on both devices; `between` runs between the GPU's hand-down and
  // its sum.
  void run_layer(int layer, int n_tokens, const std::function<void()>& between = {}) {
    const int dim = random_.config.dim;
    const std::vector<float> x = gpu::test::random_floats(rng_, n_tokens * dim, 1);
    std::vector<float> y = gpu::test::random_floats(rng_, n_tokens * dim, 1), weights;
    std::vector<int32_t> ids;
    for (int i = 0; i < n_tokens * kActive; ++i) {
      ids.push_back(asked_.empty() ? static_cast<int32_t>((rng_() % 2 * kActive + i) % kExperts)
                                   : asked_[i % asked_.size()]);
      weights.push_back(0.1f + 0.1f * static_cast<float>(i % 7));
    }
    const auto &x_gpu = keep(x), &y_gpu = keep(y), &w_gpu = keep(weights);
    const auto& ids_gpu = keep(ids);
    const auto matrix = [&](const void* data, int64_t cols, DType dtype) {
      return TensorView{const_cast<void*>(data), n_tokens, cols, cols, dtype};
    };
    const auto batch = [&](const void* rows, const void* chosen, const void* factors) {
      return ExpertBatch{
          layer,
          matrix(rows, dim, DType::kF32),
          {matrix(chosen, kActive, DType::kI32), matrix(factors, kActive, DType::kF32)}};
    };
    if (before_hand_down_) stream_.run_on_host(before_hand_down_);
    const Ticket ticket = hybrid_->submit(batch(x_gpu.data(), ids_gpu.data(), w_gpu.data()));
    if (between) between();
    const int stream_from = hybrid_->division().stream_from;
    EXPECT_EQ(hybrid_->waits(ticket), layer < 3 && (stream_from == 0 || n_tokens < stream_from));
    hybrid_->add_to(ticket, matrix(y_gpu.data(), dim, DType::kF32));
    const std::vector<float> got = y_gpu.values(stream_);
    reference_->add_to(reference_->submit(batch(x.data(), ids.data(), weights.data())),
                       matrix(y.data(), dim, DType::kF32));
    expect_close(got, y, bound_ * largest(y));
  }

  static LayerRange all_layers() { return {0, kLayers}; }
  void end_step(int n_tokens) {
    const std::vector<int32_t> tokens(n_tokens);
    const Sequence sequence = {0, n_tokens, n_tokens, {}};
    hybrid_->end_step(all_layers(), {{Batch{tokens, {}, {&sequence, 1}, {}}}, 1});
  }

  // Keeps a copy on the GPU, where a failed step may still read it.
  template <class T>
  const gpu::test::OnGpuBuffer<T>& keep(const std::vector<T>& values) {
    auto on_gpu = std::make_shared<gpu::test::OnGpuBuffer<T>>(stream_, values);
    kept_.push_back(on_gpu);
    return *on_gpu;
  }

  const cpu::KernelTable kernels_ = cpu::kernels_for(cpu::best_isa());
  RandomModel random_;
  CpuWeights whole_, part_;
  PackedModel all_, some_;
  Team team_{1};
  std::vector<std::shared_ptr<const void>> kept_;
  gpu::Stream stream_;
  CudaWeights home_;
  ModelWeights gpu_weights_;
  std::unique_ptr<CpuExperts> cpu_, reference_;
  std::unique_ptr<Interposed> interposed_;
  std::unique_ptr<CudaExpertRows> rows_;
  std::unique_ptr<CudaExperts> gpu_experts_;
  std::unique_ptr<HybridExperts> hybrid_;
  std::mt19937 rng_{5};
  std::vector<int32_t> asked_;  // expert ids of each token; empty: random ones
  double bound_ = 2e-2;
  std::chrono::duration<double> patience_{60};
  std::function<void()> before_hand_down_;
};

class ConvertedHandOff : public HybridHandOff {
 protected:
  ConvertedHandOff() : HybridHandOff(DType::kBF16, WeightFormat{DType::kI8}) {}
};
class Fp8HandOff : public HybridHandOff {
 protected:
  Fp8HandOff() : HybridHandOff(DType::kF8E4M3, {}) {}
};
}  // namespace tandem::test
