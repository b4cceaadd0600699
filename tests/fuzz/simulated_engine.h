// The real engine on a device that computes nothing: logits are numbers that depend on a token and
// its position. It runs on a thread of its own, with the tokenizer of the embedded model.
#pragma once
#include <string>
#include <thread>

#include "engine/engine.h"
#include "ops/expert_pool.h"

namespace tandem::fuzz {

class SimulatedDevice : public Device {
 public:
  Buffer allocate(int64_t bytes) override { return Buffer(bytes); }
  void copy(const void*, int64_t, void*) override {}
  void to_host(TensorView x, TensorView out) override {
    for (int64_t r = 0; r < out.rows; ++r)
      std::copy_n(x.row<float>(r), out.cols, out.row<float>(r));
  }
};

class SimulatedOps : public Ops {
 public:
  void begin(const Batch& batch) override {
    seeds_.clear();
    for (const int32_t row : batch.logit_rows)
      seeds_.push_back(static_cast<uint32_t>(batch.tokens[row] * 40503 + batch.positions[row]));
  }
  // Logits are the output of the last product of a step.
  void linear(TensorView, const QuantView&, TensorView out) override {
    for (int64_t r = 0; r < out.rows && r < std::ssize(seeds_); ++r)
      for (int64_t c = 0; c < out.cols; ++c) {
        const uint32_t mixed = (seeds_[r] + static_cast<uint32_t>(c)) * 2654435761u;
        out.row<float>(r)[c] = static_cast<float>(mixed >> 8) * 0x1p-21f;
      }
  }
  void embed(std::span<const int32_t>, const QuantView&, TensorView) override {}
  void rms_norm(TensorView, const QuantView&, float, TensorView) override {}
  void add(TensorView, TensorView) override {}
  void clear(TensorView) override {}
  void linear_per_head(const LinearPerHead&) override {}
  void rope(TensorView, std::span<const int32_t>, const RopeTable&) override {}
  void append_kv(const Batch&, TensorView, TensorView) override {}
  void mla_absorbed(const MlaArgs&) override {}
  void mla_naive(const MlaArgs&, const QuantView&) override {}
  void silu_mul(TensorView, TensorView) override {}
  void route(const RouteArgs&) override {}
  void gather_rows(TensorView, std::span<const int32_t>, TensorView) override {}

 private:
  std::vector<uint32_t> seeds_;  // one for each row of logits of the step
};

class NoExperts : public ExpertPool {
 public:
  void add_to(Ticket, TensorView) override {}

 private:
  Ticket start(const ExpertBatch&) override { return 0; }
};

class SimulatedEngine {
 public:
  static constexpr int kContext = 24;

  SimulatedEngine() : thread_([this] { engine_.run(); }) {}
  ~SimulatedEngine() {
    engine_.stop();
    thread_.join();
  }
  Engine& engine() { return engine_; }
  const Tokenizer& tokenizer() const { return tokenizer_; }
  static std::string directory() { return std::string(TANDEM_SOURCE_DIR) + "/models/tiny-r1"; }

 private:
  static ModelConfig small_config(int vocab) {
    ModelConfig config;
    config.dim = config.dense_dim = 8;
    config.vocab = vocab;
    config.n_layers = config.n_dense_layers = 1;
    config.n_shared_experts = 0;
    config.router.n_experts = 0;
    config.mla = {
        .n_heads = 1, .q_rank = 0, .kv_rank = 8, .nope_dim = 8, .rope_dim = 2, .v_dim = 8};
    config.rope.yarn = false;
    return config;
  }
  static ModelWeights no_weights() {
    ModelWeights weights;
    weights.layers.resize(1);
    return weights;
  }

  const Tokenizer tokenizer_ = Tokenizer::from_directory(directory());
  const ModelConfig config_ = small_config(tokenizer_.vocab_size());
  const ModelWeights weights_ = no_weights();
  SimulatedDevice device_;
  SimulatedOps ops_;
  NoExperts experts_;
  StepRunner model_{{config_, weights_, device_, ops_, experts_},
                    {.max_tokens = 256, .max_logits = 256},
                    AttentionForm::kAbsorbed};
  KvCache cache_{config_, 64 * kPageSize, DType::kF32};
  Engine engine_{model_, cache_, {.size = config_.vocab}, kContext, {}};
  std::thread thread_;
};

}  // namespace tandem::fuzz
