#include "bench/costs.h"

#include <algorithm>
#include <cmath>

#include "bench/random_inputs.h"
#include "cpu_kernels/line_instructions.h"
#include "model/attention_form.h"
#include "model/cost.h"
#include "model/parameters.h"
#include "ops/cpu_weights.h"

namespace tandem {

ExpertsCost cost_of_experts(const ModelConfig& c, WeightFormat format, const TensorView& ids) {
  const std::vector<int> rows = rows_of_experts(c.router, ids);
  const auto n = std::ssize(rows) - std::count(rows.begin(), rows.end(), 0);
  const int64_t pairs = ids.rows * ids.cols;
  return {{n * routed_expert_bytes(c, format), 2 * 3 * pairs * c.dim * c.expert_dim},
          static_cast<int>(n),
          *std::max_element(rows.begin(), rows.end())};
}

int64_t instructions_of_experts(const ModelConfig& c, WeightFormat format, const TensorView& ids,
                                const cpu::KernelTable& kernels) {
  constexpr int64_t kLineBytes = 64;
  const int64_t lines = routed_expert_bytes(c, format) / kLineBytes;
  double sum = 0;
  for (const int rows : rows_of_experts(c.router, ids)) {
    if (rows == 0) continue;
    const double of_line =
        cpu::instructions_of_line(kernels, kernel_type(format.dtype), format.group, rows);
    if (of_line == 0) return 0;
    sum += static_cast<double>(lines) * of_line;
  }
  return std::llround(sum);
}

Cost cost_of_absorbed(const MlaConfig& m, int64_t context, int64_t n, int64_t element_bytes) {
  return {context * m.cache_dim() * element_bytes,
          2 * n * context * m.n_heads * (m.cache_dim() + m.kv_rank)};
}

Cost cost_of_naive(const MlaConfig& m, int64_t context, int64_t n, int64_t element_bytes,
                   int64_t kv_b_bytes) {
  const AttentionOps ops = attention_ops(m, static_cast<double>(n), static_cast<double>(context));
  return {context * m.cache_dim() * element_bytes + kv_b_bytes, static_cast<int64_t>(ops.naive)};
}

namespace {

// The routed experts of all MoE layers for n tokens.
Cost cost_of_routed(const ModelConfig& c, WeightFormat format, int64_t n) {
  const int64_t n_moe = moe_layers(c);
  if (n_moe == 0) return {};
  const double experts = static_cast<double>(n_moe) * expected_experts(c.router, n);
  const auto bytes = static_cast<double>(routed_expert_bytes(c, format));
  return {std::llround(experts * bytes), 6 * n_moe * n * c.router.n_active * c.dim * c.expert_dim};
}

}  // namespace

CostOfParts cost_of_layer(const ModelConfig& config, WeightFormats formats, bool moe,
                          int64_t context, int64_t n, int64_t cache_element_bytes) {
  ModelConfig one = config;
  one.n_layers = 1;
  one.n_dense_layers = moe ? 0 : 1;
  one.moe_layer_freq = 1;
  CostOfParts cost;
  ModelWeights unused;
  for_each_weight(unused, one, [&](const WeightSpec& spec, QuantView&) {
    if (spec.layer < 0 || spec.use == WeightUse::kExpert || is_vector(spec.use)) return;
    const WeightFormat format =
        spec.use == WeightUse::kRouter ? WeightFormat{DType::kBF16} : formats.backbone;
    cost.matrices.bytes += matrix_bytes(one, spec.rows, spec.cols, format);
    cost.matrices.ops += 2 * n * spec.rows * spec.cols;
  });
  cost.experts = cost_of_routed(one, formats.experts, n);
  const MlaConfig& m = one.mla;
  const int64_t kv_b_rows = int64_t{m.n_heads} * (m.nope_dim + m.v_dim);
  const Cost absorbed = cost_of_absorbed(m, context, 1, cache_element_bytes);
  const Cost naive = cost_of_naive(m, context, n, cache_element_bytes,
                                   matrix_bytes(one, kv_b_rows, m.kv_rank, formats.backbone));
  cost.attention = {absorbed.bytes, std::min(n * absorbed.ops, naive.ops)};
  return cost;
}

CostOfParts cost_of_step(const ModelConfig& config, WeightFormats formats, DecodeShape shape,
                         int64_t cache_element_bytes) {
  const int64_t n = int64_t{shape.batch} * (1 + shape.n_drafts);
  CostOfParts cost;
  cost.experts = cost_of_routed(config, formats.experts, n);
  ModelWeights unused;
  for_each_weight(unused, config, [&](const WeightSpec& spec, QuantView&) {
    const int64_t rows = spec.rows, cols = spec.cols;
    if (spec.use == WeightUse::kExpert) return;
    if (is_vector(spec.use)) {
      cost.matrices.bytes += rows * cols * size_of(DType::kF32);
      return;
    }
    if (spec.use == WeightUse::kEmbedding) {
      cost.matrices.bytes += n * cols * size_of(DType::kBF16);  // one row per token
      if (!config.tied_head) return;
    }
    const bool bf16 = spec.use == WeightUse::kEmbedding || spec.use == WeightUse::kHead ||
                      spec.use == WeightUse::kRouter;
    cost.matrices.bytes +=
        matrix_bytes(config, rows, cols, bf16 ? WeightFormat{DType::kBF16} : formats.backbone);
    cost.matrices.ops += 2 * n * rows * cols;
  });
  const Cost one = cost_of_absorbed(config.mla, shape.context, 1, cache_element_bytes);
  cost.attention = {int64_t{shape.batch} * config.n_layers * one.bytes,
                    n * config.n_layers * one.ops};
  return cost;
}

int64_t backbone_bytes(const ModelConfig& config, WeightFormats formats) {
  return cost_of_step(config, formats, {0, 1}, 0).matrices.bytes + embedding_bytes(config);
}

}  // namespace tandem
