// Multi-head latent attention (DeepSeek-V2 paper, section 2.1): its projections, its rows of the
// cache, and the choice between the absorbed and the naive form. The cache holds one vector of
// kv_rank + rope_dim a token, shared by all heads.
#pragma once
#include <vector>

#include "model/attention_form.h"
#include "model/weights.h"
#include "ops/device.h"
#include "ops/ops.h"

namespace tandem {

class MlaAttention {
 public:
  // For steps of up to max_tokens tokens, with n_heads heads of the model. References outlive the
  // object. Allocates its scratch on the device; throws Error when too little memory is left.
  MlaAttention(const ModelConfig& config, int n_heads, Ops& ops, Device& device, int max_tokens,
               AttentionForm form);
  static int64_t bytes_for(const ModelConfig& config, int max_tokens);

  // out = attention(h) for the tokens of the batch, both [tokens, dim]; adds their latents and rope
  // keys to `cache`. With some of the heads it is their part of a sum.
  void forward(const AttentionWeights& w, const Batch& batch, TensorView h, TensorView cache,
               TensorView out);

  // Whether the operations of such a step depend on its numbers of tokens alone, those of each
  // sequence included: a decode step, with drafts or without, all in the absorbed form.
  bool is_uniform(const Batch& batch) const;

 private:
  // Scratch matrices; n is the number of tokens of the step.
  struct Scratch {
    TensorView q_a;       // [n, q_rank]
    TensorView q;         // [n, heads * qk_dim]
    TensorView kv;        // [n, kv_rank + rope_dim]
    TensorView q_latent;  // [n * heads, kv_rank]
    TensorView o_latent;  // [n * heads, kv_rank]
    TensorView o;         // [n, heads * v_dim]
  };
  template <class Visit>
  static void for_each_matrix(Scratch& s, const MlaConfig& mla, int max_tokens, Visit visit);

  void project(const AttentionWeights& w, const Batch& batch, TensorView h, TensorView cache);
  void absorbed(const AttentionWeights& w, MlaArgs args);
  bool prefers_naive(const Sequence& s) const;

  const ModelConfig& c_;
  const MlaConfig mla_;  // with the heads that are here
  Ops& ops_;
  const AttentionForm form_;
  const std::vector<float> frequencies_;
  const RopeTable rope_;
  const float softmax_scale_;
  Arena arena_;
  Scratch scratch_;
};

}  // namespace tandem
