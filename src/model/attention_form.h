// Two equivalent computations of MLA (DeepSeek-V2, section 2.1.2): naive restores the keys and
// values of every head from the latents; absorbed projects queries into the latent space and
// outputs back.
#pragma once
#include "model/config.h"

namespace tandem {

enum class AttentionForm { kAuto, kNaive, kAbsorbed };

// Operations of causal attention for the last n_queries of kv_length tokens, including products
// with kv_b. The absorbed form multiplies every query by kv_b and the naive form every key, but the
// naive form needs fewer operations per pair of query and key. Exact for whole numbers.
struct AttentionOps {
  double absorbed, naive;
};
inline AttentionOps attention_ops(const MlaConfig& m, double n_queries, double kv_length) {
  const double heads = m.n_heads;
  const double pairs = n_queries * kv_length - n_queries * (n_queries - 1) / 2;
  const double kv_b = 2 * heads * m.kv_rank * (m.nope_dim + m.v_dim);
  return {kv_b * n_queries + 2 * heads * (m.cache_dim() + m.kv_rank) * pairs,
          kv_b * kv_length + 2 * heads * (m.qk_dim() + m.v_dim) * pairs};
}

inline bool naive_is_cheaper(const MlaConfig& m, double n_queries, double kv_length) {
  const AttentionOps ops = attention_ops(m, n_queries, kv_length);
  return ops.naive < ops.absorbed;
}

}  // namespace tandem
