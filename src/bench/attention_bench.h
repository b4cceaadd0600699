// `tandem bench attention`: one layer's attention over the paged cache, without its projections.
#pragma once
#include "bench/experts_bench.h"

namespace tandem {

struct AttentionBench {
  std::string config_name;
  ModelConfig config;
  std::vector<int> contexts;       // tokens in the cache
  std::vector<int> prompt_tokens;  // query tokens at once; rows besides decoding
  std::vector<int> batches;        // decoding sequences
  double seconds;
  int64_t memory_bytes;
  GpuBenchModels gpus = {};  // empty: no GPU
};

// Cost of one token in absorbed form over `context` tokens: the cache is read once.
struct AttentionCost {
  int64_t bytes, ops;
};
AttentionCost cost_of_absorbed(const MlaConfig& mla, int64_t context, int64_t cache_element_bytes);
// Cost of the last `n` of `context` tokens in naive form; kv_b has `kv_b_bytes`.
AttentionCost cost_of_naive(const MlaConfig& mla, int64_t context, int64_t n,
                            int64_t cache_element_bytes, int64_t kv_b_bytes);

void bench_attention(const AttentionBench& bench, const cpu::KernelTable& kernels,
                     MachineSpeed& speed, const OnRow& on_row);

// One row per AttentionVariant (attention_variants.h).
void bench_attention_variants(const AttentionBench& bench, const cpu::KernelTable& kernels,
                              MachineSpeed& speed, const OnRow& on_row);

}  // namespace tandem
