// Small models of DeepSeek-V3's architecture that compute quickly.
#pragma once
#include "bench/bench_model.h"

namespace tandem {

// The smallest configuration with every part of the large models.
inline ModelConfig small_config() {
  ModelConfig c;
  c.dim = 64;
  c.vocab = 61;
  c.n_layers = 2;
  c.n_dense_layers = 1;
  c.dense_dim = 96;
  c.expert_dim = 32;
  c.mla = {.n_heads = 4, .q_rank = 24, .kv_rank = 32, .nope_dim = 16, .rope_dim = 8, .v_dim = 16};
  c.router.n_experts = 16;
  c.router.n_active = 4;
  c.router.n_groups = 4;
  c.router.n_active_groups = 2;
  return c;
}

// Layers of which the first one is dense, with 4 experts of which a token uses 2: for counts of
// routing.
inline ModelConfig config_of_four_experts(int n_layers) {
  ModelConfig c;
  c.n_layers = n_layers;
  c.n_dense_layers = 1;
  c.router.n_experts = 4;
  c.router.n_active = 2;
  return c;
}

// R1 with small dimensions that the benchmarks accept.
inline ModelConfig small_r1() {
  ModelConfig c = bench_config("r1");
  c.dim = 256;
  c.vocab = 512;
  c.n_layers = 3;
  c.n_dense_layers = 1;
  c.dense_dim = 384;
  c.expert_dim = 128;
  c.mla = {.n_heads = 4, .q_rank = 64, .kv_rank = 128, .nope_dim = 32, .rope_dim = 16, .v_dim = 32};
  c.router.n_experts = 32;
  c.router.n_groups = 4;
  c.router.n_active_groups = 2;
  c.router.n_active = 4;
  return c;
}

}  // namespace tandem
