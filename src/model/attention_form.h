// Two orders of the same sums (DeepSeek-V2, 2.1.2): naive restores keys and values of every head
// from the latents, absorbed brings queries into their space and outputs back.
#pragma once
#include "model/config.h"

namespace tandem {

enum class AttentionForm { kAuto, kNaive, kAbsorbed };

// Operations for the last n_queries of kv_length tokens, products with kv_b among them: the
// absorbed form brings every query through it, and the naive one every key, but a pair of query and
// key costs that less. Whole numbers are exact.
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
