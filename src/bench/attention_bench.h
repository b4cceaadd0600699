// `tandem bench attention`: one layer's attention over the paged cache, without its projections.
#pragma once
#include "bench/experts_bench.h"

namespace tandem {

struct AttentionBench {
  std::string config_name;
  ModelConfig config;
  std::vector<int> contexts;       // tokens in the cache
  std::vector<int> prompt_tokens;  // the last of them at once; rows beside decoding
  std::vector<int> batches;        // sequences that decode at a time
  double seconds;
  int64_t memory_bytes;
  GpuTwins gpus = {};  // empty: no GPU
};

// One token against `context` in latent space: it reads the cache once, in BF16.
struct AttentionCost {
  int64_t bytes, ops;
};
AttentionCost cost_of_absorbed(const MlaConfig& mla, int64_t context, int64_t cache_element_bytes);
// The last `n` of `context` tokens with keys and values restored by kv_b of `kv_b_bytes`.
AttentionCost cost_of_naive(const MlaConfig& mla, int64_t context, int64_t n,
                            int64_t cache_element_bytes, int64_t kv_b_bytes);

void bench_attention(const AttentionBench& bench, const cpu::KernelTable& kernels,
                     MachineSpeed& speed, const OnRow& on_row);

// A row for each of the five orders of computing one token's attention (attention_variants.h).
void bench_attention_variants(const AttentionBench& bench, const cpu::KernelTable& kernels,
                              MachineSpeed& speed, const OnRow& on_row);

}  // namespace tandem
