// The forward pass of DeepSeek-V2, V3, R1, Kimi-K2 and Moonlight. Start reading at
// DeepSeek::forward in deepseek.cpp.
#pragma once
#include <vector>

#include "core/memory.h"
#include "engine/kv_cache.h"
#include "model/attention_form.h"
#include "model/weights.h"
#include "ops/experts.h"
#include "ops/ops.h"

namespace tandem {

// Scratch matrices for the largest step; a step uses the first n rows, a part of it its own.
struct Activations {
  TensorView x;         // [n, dim] residual stream
  TensorView h;         // [n, dim] normalised input of a sub-layer
  TensorView y;         // [n, dim] output of a sub-layer
  TensorView q_a;       // [n, q_rank]
  TensorView q;         // [n, heads * qk_dim]
  TensorView kv;        // [n, kv_rank + rope_dim]
  TensorView q_latent;  // [n * heads, kv_rank]
  TensorView o_latent;  // [n * heads, kv_rank]
  TensorView o;         // [n, heads * v_dim]
  TensorView gate, up;  // [n, max ffn dim]
  TensorView scores;    // [n, n_experts]
  Routing routing;      // [n, n_active]
  TensorView last;      // [n_logits, dim] rows that want logits
  TensorView logits;    // [n_logits, vocab]
};

class DeepSeek {
 public:
  struct Limits {
    int max_tokens = 512;  // in a step
    int max_logits = 64;   // rows of logits in a step
  };

  // All references outlive the model. Activations are allocated here, once.
  DeepSeek(const ModelConfig& config, const ModelWeights& weights, Ops& ops, RoutedExperts& experts,
           Limits limits, AttentionForm form);

  // Of activations.
  static int64_t bytes_for(const ModelConfig& config, Limits limits);

  // Runs one step: fills the cache for every token of `batch` and computes one row of logits()
  // [n_logits, vocab] a batch.logit_rows. The step may still be under way when this returns; what
  // is asked of ops() follows it.
  void forward(const Batch& batch, KvCache& cache);
  // The same, and brings the logits to the host's memory.
  void forward(const Batch& batch, KvCache& cache, TensorView logits);
  // Of the last step, in the device's memory; [max_logits, vocab].
  TensorView logits() const { return buffers_.logits; }
  Ops& ops() { return ops_; }

  const ModelConfig& config() const { return c_; }
  const Limits& limits() const { return limits_; }

 private:
  bool decodes(const Batch& batch) const;
  StepParts parts_of(const Batch& step) const;
  void layers(const Batch& step, const StepParts& parts, KvCache& cache);
  void begin_layer(int layer, const Batch& part, TensorView cache);
  void end_layer(int layer, const Batch& part);
  void attention(const AttentionWeights& w, const Batch& part, TensorView cache, Activations& a);
  void absorbed(const AttentionWeights& w, MlaArgs args);
  bool prefers_naive(const Sequence& s) const;
  void feed_forward(const FfnWeights& w, Activations& a);
  void mixture_of_experts(int layer, const Batch& part, Activations& a);
  Activations rows_of(const Batch& part) const;

  const ModelConfig& c_;
  const ModelWeights& w_;
  Ops& ops_;
  RoutedExperts& experts_;
  const Limits limits_;
  const AttentionForm form_;
  const std::vector<float> frequencies_;
  const RopeTable rope_;
  const float softmax_scale_;
  Arena arena_;
  Activations buffers_;
};

}  // namespace tandem
