// The minimum work of parts of a model: bytes that must be read and operations.
#pragma once
#include "bench/bench_model.h"

namespace tandem {

// The minimum work of a run. A multiplication and an addition count as two operations.
struct Cost {
  int64_t bytes = 0;  // read from memory
  int64_t ops = 0;
  int64_t instructions = 0;  // that the kernels execute for them; 0: not counted
};

// A step with this routing: each used expert is read once, the row of every (token, expert) pair is
// multiplied.
struct ExpertsCost : Cost {
  int n_experts;        // distinct experts
  int rows_of_busiest;  // tokens of the most used expert
};
// ids: [tokens, n_active].
ExpertsCost cost_of_experts(const ModelConfig& config, WeightFormat format, const TensorView& ids);
// The instructions that the products of these experts execute; 0 where they have not been counted
// (cpu_kernels/line_instructions.h).
int64_t instructions_of_experts(const ModelConfig& config, WeightFormat format,
                                const TensorView& ids, const cpu::KernelTable& kernels);

// The last `n` of `context` tokens in absorbed form: the cache is read once.
Cost cost_of_absorbed(const MlaConfig& mla, int64_t context, int64_t n,
                      int64_t cache_element_bytes);
// The last `n` of `context` tokens in naive form; kv_b has `kv_b_bytes`.
Cost cost_of_naive(const MlaConfig& mla, int64_t context, int64_t n, int64_t cache_element_bytes,
                   int64_t kv_b_bytes);

// A step of the next token and of n_drafts drafts of each of `batch` sequences at the end of
// `context`.
struct DecodeShape {
  int context, batch;
  int n_drafts = 0;
};

// Parts that run one after another, so their rooflines add up. Experts: the number that uniform
// routing is expected to choose.
struct CostOfParts {
  Cost matrices, experts, attention;  // attention: over the cache only
  Cost sum() const {
    return {matrices.bytes + experts.bytes + attention.bytes,
            matrices.ops + experts.ops + attention.ops};
  }
};
// One layer, for the last `n` of `context` tokens.
CostOfParts cost_of_layer(const ModelConfig& config, WeightFormats formats, bool moe,
                          int64_t context, int64_t n, int64_t cache_element_bytes);
CostOfParts cost_of_step(const ModelConfig& config, WeightFormats formats, DecodeShape shape,
                         int64_t cache_element_bytes);
// Bytes of all weights but the routed experts.
int64_t backbone_bytes(const ModelConfig& config, WeightFormats formats);

}  // namespace tandem
