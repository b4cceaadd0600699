// Every weight of the model, declared once. for_each_weight() is the single list of tensors: it
// drives loading, the checks of names and shapes, byte counts and `tandem inspect`.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "core/tensor.h"
#include "core/topology.h"
#include "model/backbone_share.h"
#include "model/config.h"

namespace tandem {

// A gated feed-forward network: down(silu(gate(x)) * up(x)). Dense layers, shared experts and every
// routed expert have this shape.
struct FfnWeights {
  QuantView gate, up;  // [ffn_dim, dim]
  QuantView down;      // [dim, ffn_dim]
};

struct AttentionWeights {
  QuantView q;          // [n_heads * qk_dim, dim], only when q_rank is 0
  QuantView q_a;        // [q_rank, dim]
  QuantView q_a_norm;   // [1, q_rank]
  QuantView q_b;        // [n_heads * qk_dim, q_rank]; per head nope rows, then rope rows
  QuantView kv_a;       // [kv_rank + rope_dim, dim]
  QuantView kv_a_norm;  // [1, kv_rank]
  QuantView kv_b;  // [n_heads * (nope_dim + v_dim), kv_rank]; per head key rows, then value rows
  QuantView o;     // [dim, n_heads * v_dim]
};

struct LayerWeights {
  QuantView attn_norm, ffn_norm;  // [1, dim]
  AttentionWeights attn;
  FfnWeights ffn;         // dense FFN, or the shared expert of a MoE layer (empty if there is none)
  QuantView router;       // [n_experts, dim]
  QuantView router_bias;  // [1, n_experts], kF32; only topk_method noaux_tc
  // [slices * n_experts], all experts of slice 0 first; MoE layers only
  std::vector<FfnWeights> experts;
};

// What an MTP layer has beside the weights of a layer (V3 report, section 2.2).
struct MtpWeights {
  QuantView embed;        // [vocab, dim]; empty: the model's
  QuantView embed_norm;   // enorm [1, dim]
  QuantView hidden_norm;  // hnorm [1, dim]
  QuantView
      projection;  // eh_proj [dim, 2 * dim]: columns of the embedding, then of the hidden state
  QuantView norm;  // shared_head.norm [1, dim]
  QuantView head;  // [vocab, dim]; empty: the model's
};

struct ModelWeights {
  QuantView embed;                   // [vocab, dim]
  QuantView final_norm;              // [1, dim]
  QuantView head;                    // [vocab, dim]; the embedding when tied
  std::vector<LayerWeights> layers;  // the model's, then those of the MTP layers in use
  std::vector<MtpWeights> mtp;       // [n_used_mtp_layers]
  // How routed experts are sliced along expert_dim: rows of gate and up, columns of down. Empty:
  // experts are whole.
  std::vector<Slice> slices;
  // What of the backbone is here; nothing: all. Rows of q, q_b, kv_b, gate, up and head, columns of
  // o and down.
  std::optional<BackboneShare> share;
  BackboneShare share_of(const ModelConfig& config) const {
    return share ? *share : whole_backbone(config);
  }
};

// The role of a tensor; it decides how the tensor is checked and in which format it is kept.
enum class WeightUse {
  kEmbedding,
  kHead,
  kMtpProjection,
  kNorm,       // a vector of gains
  kAttention,  // a matrix; FP8 with block scales in FP8 checkpoints
  kDense,      // a matrix of a dense layer's FFN
  kShared,     // a matrix of the shared expert
  kExpert,     // a matrix of a routed expert
  kRouter,
  kRouterBias,
};

// Vectors are kept in float and never split; all other tensors are matrices.
constexpr bool is_vector(WeightUse use) {
  return use == WeightUse::kNorm || use == WeightUse::kRouterBias;
}

struct WeightSpec {
  std::string name;  // in the checkpoint
  int layer;         // -1 outside the layers
  int expert;        // -1 unless it belongs to a routed expert
  WeightUse use;
  int64_t rows, cols;  // vectors are [1, n]
  // If not 0, the tensor is packed INT4 with a scale for every `group` columns. Instead of `name`
  // the checkpoint then has name_packed I32 [rows, cols / 8], name_scale BF16 [rows, cols / group]
  // and name_shape.
  int group = 0;
  int slice = 0;                         // of a sliced expert
  int64_t first_row = 0, first_col = 0;  // of a part of the checkpoint's tensor
};

// What `spec` has of a whole tensor of the checkpoint.
inline QuantView part_of(const WeightSpec& spec, const QuantView& whole) {
  return whole.rows_from(spec.first_row, spec.rows).cols_from(spec.first_col, spec.cols);
}

// Calls visit(WeightSpec, QuantView& slot) for every tensor of the checkpoint that the model and
// the MTP layers in use need, in the order of the forward pass. Resizes w.layers, their experts and
// w.mtp. A tensor of a sliced expert is visited once for every slice that is not empty, and of a
// divided backbone, or of a pipeline stage, only what is here.
template <class Visit>
void for_each_weight(ModelWeights& w, const ModelConfig& c, Visit visit) {
  const MlaConfig& a = c.mla;
  w.layers.resize(c.n_all_layers());
  w.mtp.resize(c.n_used_mtp_layers);
  const std::vector<Slice> slices =
      w.slices.empty() ? std::vector<Slice>{{0, c.expert_dim}} : w.slices;
  const BackboneShare share = w.share_of(c);
  const Slice vocab = share.head();
  const auto of_heads = [&](int64_t size) -> Slice {
    return {share.heads.first * size, share.heads.n * size};
  };
  const auto part = [&](const std::string& name, int layer, QuantView& slot, WeightUse use,
                        Slice rows, Slice cols) {
    if (rows.n > 0 && cols.n > 0)
      visit(WeightSpec{name, layer, -1, use, rows.n, cols.n, 0, 0, rows.first, cols.first}, slot);
  };
  if (share.is_first_stage() || (c.tied_head && share.is_last_stage(c)))
    visit(WeightSpec{"model.embed_tokens.weight", -1, -1, WeightUse::kEmbedding, c.vocab, c.dim},
          w.embed);
  for (int l = 0; l < c.n_all_layers(); ++l) {
    if (!has_layer(share.layers, l)) continue;
    LayerWeights& layer = w.layers[l];
    const std::string p = "model.layers." + std::to_string(l) + ".";
    const auto one = [&](const std::string& name, QuantView& slot, WeightUse use, int64_t rows,
                         int64_t cols) {
      visit(WeightSpec{p + name, l, -1, use, rows, cols}, slot);
    };
    const auto ffn = [&](const std::string& name, FfnWeights& f, WeightUse use, Slice width,
                         int expert = -1, int slice = 0) {
      const auto [first, n] = width;
      if (n == 0) return;
      const int group = expert < 0 ? 0 : c.expert_group;
      visit(WeightSpec{p + name + "gate_proj.weight", l, expert, use, n, c.dim, group, slice, first,
                       0},
            f.gate);
      visit(
          WeightSpec{p + name + "up_proj.weight", l, expert, use, n, c.dim, group, slice, first, 0},
          f.up);
      visit(WeightSpec{p + name + "down_proj.weight", l, expert, use, c.dim, n, group, slice, 0,
                       first},
            f.down);
    };

    if (l >= c.n_layers) {
      MtpWeights& mtp = w.mtp[l - c.n_layers];
      if (c.mtp_has_embedding)
        one("embed_tokens.weight", mtp.embed, WeightUse::kEmbedding, c.vocab, c.dim);
      one("enorm.weight", mtp.embed_norm, WeightUse::kNorm, 1, c.dim);
      one("hnorm.weight", mtp.hidden_norm, WeightUse::kNorm, 1, c.dim);
      one("eh_proj.weight", mtp.projection, WeightUse::kMtpProjection, c.dim, 2 * c.dim);
      one("shared_head.norm.weight", mtp.norm, WeightUse::kNorm, 1, c.dim);
      if (c.mtp_has_head)
        part(p + "shared_head.head.weight", l, mtp.head, WeightUse::kHead, vocab, {0, c.dim});
    }
    one("input_layernorm.weight", layer.attn_norm, WeightUse::kNorm, 1, c.dim);
    if (a.q_rank == 0) {
      part(p + "self_attn.q_proj.weight", l, layer.attn.q, WeightUse::kAttention,
           of_heads(a.qk_dim()), {0, c.dim});
    } else {
      one("self_attn.q_a_proj.weight", layer.attn.q_a, WeightUse::kAttention, a.q_rank, c.dim);
      one("self_attn.q_a_layernorm.weight", layer.attn.q_a_norm, WeightUse::kNorm, 1, a.q_rank);
      part(p + "self_attn.q_b_proj.weight", l, layer.attn.q_b, WeightUse::kAttention,
           of_heads(a.qk_dim()), {0, a.q_rank});
    }
    one("self_attn.kv_a_proj_with_mqa.weight", layer.attn.kv_a, WeightUse::kAttention,
        a.cache_dim(), c.dim);
    one("self_attn.kv_a_layernorm.weight", layer.attn.kv_a_norm, WeightUse::kNorm, 1, a.kv_rank);
    part(p + "self_attn.kv_b_proj.weight", l, layer.attn.kv_b, WeightUse::kAttention,
         of_heads(a.nope_dim + a.v_dim), {0, a.kv_rank});
    part(p + "self_attn.o_proj.weight", l, layer.attn.o, WeightUse::kAttention, {0, c.dim},
         of_heads(a.v_dim));
    one("post_attention_layernorm.weight", layer.ffn_norm, WeightUse::kNorm, 1, c.dim);
    if (!c.is_moe(l)) {
      ffn("mlp.", layer.ffn, WeightUse::kDense, share.dense);
      continue;
    }
    one("mlp.gate.weight", layer.router, WeightUse::kRouter, c.router.n_experts, c.dim);
    if (c.router.has_bias())
      one("mlp.gate.e_score_correction_bias", layer.router_bias, WeightUse::kRouterBias, 1,
          c.router.n_experts);
    if (c.n_shared_experts > 0)
      ffn("mlp.shared_experts.", layer.ffn, WeightUse::kShared, share.shared);
    layer.experts.resize(slices.size() * c.router.n_experts);
    for (int slice = 0; slice < std::ssize(slices); ++slice)
      for (int e = 0; e < c.router.n_experts; ++e)
        ffn("mlp.experts." + std::to_string(e) + ".", layer.experts[slice * c.router.n_experts + e],
            WeightUse::kExpert, slices[slice], e, slice);
  }
  if (!share.is_last_stage(c)) return;
  visit(WeightSpec{"model.norm.weight", -1, -1, WeightUse::kNorm, 1, c.dim}, w.final_norm);
  if (!c.tied_head) part("lm_head.weight", -1, w.head, WeightUse::kHead, vocab, {0, c.dim});
}

}  // namespace tandem
