// Two orders of the same sums (DeepSeek-V2, 2.1.2): naive restores keys and values of every head from
// the latents, absorbed brings queries into their space and outputs back.
#pragma once
#include "model/config.h"

namespace tandem {

enum class AttentionForm { kAuto, kNaive, kAbsorbed };

// Whether the naive form takes fewer operations for the last n_queries of kv_length tokens. The
// absorbed one brings every query through kv_b, and the naive one every key, but a pair of query
// and key costs it less.
inline bool naive_is_cheaper(const MlaConfig& m, double n_queries, double kv_length) {
  const double pairs = n_queries * kv_length - n_queries * (n_queries - 1) / 2;
  const double saved = pairs * (2 * m.kv_rank - m.nope_dim - m.v_dim);
  return saved > (kv_length - n_queries) * m.kv_rank * (m.nope_dim + m.v_dim);
}

}  // namespace tandem
