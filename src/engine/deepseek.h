// The forward pass of DeepSeek-V2, V3, R1, Kimi-K2 and Moonlight: embed(), layers(), head(). Start
// reading at deepseek.cpp; attention is in mla_attention.cpp, multi-token prediction in
// deepseek_mtp.cpp, and what ranks of all replicas divide in deepseek_replicas.cpp.
#pragma once
#include <array>
#include <vector>

#include "engine/mla_attention.h"
#include "engine/pass.h"
#include "ops/expert_pool.h"
#include "scheduling/kv_cache.h"

namespace tandem {

// The parts that compute a forward pass. All references outlive the model.
struct ModelParts {
  const ModelConfig& config;
  const ModelWeights& weights;
  Device& device;
  Ops& ops;  // operations of `device`
  ExpertPool& experts;
  int replica = 0, n_replicas = 1;  // of the backbone: this one, which has tokens of its own
};

// Upper limits of one step.
struct StepLimits {
  int max_tokens = 512;
  int max_logits = 64;  // rows of logits
};

// The hidden states with which an MTP layer begins.
enum class HiddenStates {
  kOfModel,   // of the rows hidden_rows of the last step of the model's layers
  kOfLayer,   // of the same rows, as the MTP layer before has left them
  kOfLogits,  // of the rows hidden_rows of logits of the last step of an MTP layer
};

class DeepSeek {
 public:
  // Allocates its scratch on the device, once. Throws Error when too little memory is left.
  DeepSeek(const ModelParts& parts, StepLimits limits, AttentionForm form);
  // Bytes of scratch on the device.
  static int64_t bytes_for(const ModelConfig& config, StepLimits limits,
                           const BackboneShare& share);

  // Whether ranks of other replicas need this one in a step without tokens of its own.
  bool shares() const { return share_.by_replicas.any(); }
  // Called before the other calls of a step, with the tokens of all replicas.
  void begin_step(std::span<const Batch> replicas, int n_micro_batches);

  // The layers that are here: all, or those of a pipeline stage.
  LayerRange main_layers() const;
  // Begins a step: the residual stream is the embedding of its tokens, or what the stage before has
  // made of it.
  void embed(const Batch& step);
  // In a later stage: the residual stream of the next step that the stage before sends.
  void receive(const Batch& step) { ops_.receive(rows_of(step).x); }
  // Computes layers for the tokens of `batch`, which outlives the pass: fills the cache and
  // changes the residual stream. Suspends where it waits for experts. The coroutine frame is
  // allocated in `memory`.
  Pass layers(LayerRange range, const Batch& batch, KvCache& cache, PassMemory& memory);
  // In a step without tokens of its own: this rank's columns of a dense layer, for other replicas.
  void dense_for_others(int layer, int micro_batch) {
    const TensorView none = {nullptr, 0, c_.dim, c_.dim};
    if (share_.by_replicas.dense) divided_feed_forward(layer, micro_batch, none, none);
  }
  // Ends a step, once all its passes are done: computes logits() from row first_row on for the rows
  // batch.logit_rows, or sends the residual stream to the next stage.
  void head(const Batch& step, int64_t first_row = 0);

  // Multi-token prediction (V3 report, section 2.2), after the last step of the model's layers.
  // Hidden state i is that of a token at position p, and token i of `step` the one at p + 1; the
  // logits are those of the token at p + 2.
  LayerRange mtp_layers(int module) const {
    return {c_.n_layers + module, c_.n_layers + module + 1};
  }
  // Begins a step of an MTP layer: joins hidden states and embeddings to the residual stream.
  void join(int module, HiddenStates states, const Batch& step);
  // Ends it: the hidden states are its own, and logits() those of batch.logit_rows.
  void mtp_head(int module, const Batch& step);

  TensorView logits() const { return scratch_.logits; }  // [max_logits, vocab], on the device
  // From now on, before the first step, the routers count how often they choose each expert.
  void count_experts();
  // These counts, on the device: uint32_t as kI32 [n_all_layers, n_experts], modulo 2^32. 0 for
  // dense layers.
  TensorView expert_uses() const { return scratch_.uses; }
  const MlaAttention& attention() const { return attention_; }

 private:
  // Scratch matrices, sized for the largest step.
  struct Scratch {
    TensorView x;         // [n, dim] residual stream
    TensorView h;         // [n, dim] normalised input of a sub-layer
    TensorView y;         // [n, dim] output of a sub-layer
    TensorView gate, up;  // [n, max ffn dim]
    TensorView scores;    // [n, n_experts]
    Routing routing;      // [n, n_active]
    TensorView last;      // [n_logits, dim] rows for which logits are computed
    TensorView logits;    // [n_logits, vocab]
    TensorView hidden;    // [n, dim] hidden states after a norm; with MTP layers only
    TensorView joined;    // [n, 2 * dim] normalised embedding and hidden state
    TensorView uses;      // [n_all_layers, n_experts]
    // Rows of all replicas, where their ranks divide dense layers or the head.
    TensorView all_h, all_y;  // [n, dim]
    TensorView all_logits;    // [n_logits, columns of this rank]
    TensorView exchanged;     // [n_logits of a replica, columns of the like ranks]
  };
  template <class Visit>
  static void for_each_matrix(Scratch& s, const ModelConfig& config, StepLimits limits,
                              const BackboneShare& share, Visit visit);

  Scratch rows_of(const Batch& batch) const;
  void feed_forward(const FfnWeights& w, const Scratch& s);
  template <class Visit>
  void for_each_piece(std::span<const int64_t> n_rows, int64_t max_rows, Visit visit);
  void divided_feed_forward(int layer, int micro_batch, TensorView h, TensorView y);
  void divided_logits(TensorView rows, const QuantView& head, TensorView logits);
  void project_to_vocabulary(TensorView rows, const QuantView& head, int64_t first_row = 0);
  Ticket route(int layer, const Batch& batch, const Scratch& s);
  void upload_simulated(Device& device);
  SimulatedRows simulated_rows(int layer, const Batch& batch) const;

  const ModelConfig& c_;
  const ModelWeights& w_;
  Ops& ops_;
  ExpertPool& experts_;
  const int replica_, n_replicas_;
  const BackboneShare share_;  // what of the backbone this rank has
  MlaAttention attention_;
  Arena arena_;
  Scratch scratch_;
  bool counts_experts_ = false;
  const StepLimits limits_;
  // [micro-batches][replicas] tokens of the step, [replicas] rows of logits, and of a piece of
  // these
  std::array<std::vector<int64_t>, kMaxMicroBatches> tokens_of_replicas_;
  std::vector<int64_t> logits_of_replicas_, piece_;
  Buffer simulated_;  // RouterConfig::simulated on the device; empty: none
};

}  // namespace tandem
