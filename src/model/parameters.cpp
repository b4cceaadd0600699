#include "model/parameters.h"

namespace tandem {

int moe_layers(const ModelConfig& c, int first, int last) {
  int n = 0;
  for (int layer = first; layer <= last; ++layer) n += c.is_moe(layer) ? 1 : 0;
  return n;
}

int moe_layers(const ModelConfig& c) { return moe_layers(c, 0, c.n_layers - 1); }

namespace {

void count_mtp(const ModelConfig& config, ParameterCounts& counts);
int64_t expert_parameters(const ModelConfig& config);
int64_t inactive_parameters(const ModelConfig& config);

}  // namespace

ParameterCounts count_parameters(const ModelConfig& config) {
  ParameterCounts counts;
  const int64_t vocab_matrix = static_cast<int64_t>(config.vocab) * config.dim;
  counts.embedding = vocab_matrix;
  counts.head = config.tied_head ? 0 : vocab_matrix;
  counts.norms = config.dim;
  int64_t inactive = 0;
  for (int l = 0; l < config.n_layers; ++l) {
    const LayerParameters layer = count_layer_parameters(config, config.is_moe(l));
    counts.attention += layer.attention;
    counts.dense_mlp += layer.dense_mlp;
    counts.shared_experts += layer.shared_experts;
    counts.routed_experts += layer.routed_experts;
    counts.router += layer.router;
    counts.norms += layer.norms;
    if (config.is_moe(l)) inactive += inactive_parameters(config);
  }
  counts.total = counts.embedding + counts.head + counts.attention + counts.dense_mlp +
                 counts.shared_experts + counts.routed_experts + counts.router + counts.norms;
  counts.one_expert = expert_parameters(config);
  counts.activated = counts.total - counts.embedding - counts.head - inactive + vocab_matrix;
  count_mtp(config, counts);
  return counts;
}

LayerParameters count_layer_parameters(const ModelConfig& config, bool moe) {
  const MlaConfig& a = config.mla;
  const int64_t dim = config.dim, heads = a.n_heads;
  const int64_t q =
      a.q_rank == 0 ? dim * heads * a.qk_dim() : a.q_rank * (dim + 1 + heads * a.qk_dim());
  LayerParameters layer;
  layer.attention = q + dim * a.cache_dim() + a.kv_rank +
                    a.kv_rank * heads * (a.nope_dim + a.v_dim) + heads * a.v_dim * dim;
  layer.norms = 2 * dim;
  if (!moe) {
    layer.dense_mlp = 3 * dim * config.dense_dim;
    return layer;
  }
  layer.shared_experts = 3 * dim * config.shared_dim();
  layer.routed_experts = config.router.n_experts * expert_parameters(config);
  layer.router = config.router.n_experts * (dim + (config.router.has_bias() ? 1 : 0));
  return layer;
}

namespace {

// An MTP layer is a layer of the model (a MoE layer if the model has experts) preceded by eh_proj
// [dim, 2 * dim], with the additional norms enorm, hnorm and shared_head.norm.
void count_mtp(const ModelConfig& config, ParameterCounts& counts) {
  const bool moe = config.router.n_experts > 0;
  const int64_t dim = config.dim, vocab_matrix = config.vocab * dim;
  const int64_t own = 2 * dim * dim + 3 * dim + count_layer_parameters(config, moe).total();
  const int64_t inactive = moe ? inactive_parameters(config) : 0;
  counts.mtp = config.n_mtp_layers * own;
  counts.mtp_stored = config.n_mtp_layers * (own + 2 * vocab_matrix);
  counts.mtp_activated = config.n_mtp_layers * (own - inactive + vocab_matrix);
}

int64_t expert_parameters(const ModelConfig& config) {
  return int64_t{3} * config.dim * config.expert_dim;
}

// Parameters of the experts of one MoE layer that a token does not use.
int64_t inactive_parameters(const ModelConfig& config) {
  return (config.router.n_experts - config.router.n_active) * expert_parameters(config);
}

}  // namespace
}  // namespace tandem
