#include "offload/plan/rules.h"

#include <fmt/format.h>

#include "model/parameters.h"

namespace tandem {

double least_dp_for_compute_bound(const ModelConfig& c) {
  return static_cast<double>(c.router.n_experts) / c.router.n_active;
}

int most_useful_ep(const ModelConfig& c) { return c.router.n_experts + c.n_shared_experts; }

double one_expert_read_seconds(const ModelConfig& c, double read_bytes_per_second) {
  return static_cast<double>(count_parameters(c).one_expert) / read_bytes_per_second;
}

double ridge_tokens_per_expert(double ops_per_second, double read_bytes_per_second,
                               double bytes_per_weight) {
  constexpr double kOpsPerWeight = 2;
  return bytes_per_weight * ops_per_second / (kOpsPerWeight * read_bytes_per_second);
}

std::optional<std::string> split_refusal(const char* what, int width, int ways) {
  if (ways == 1 || width % (ways * kSplitMultiple) == 0) return {};
  const double part = static_cast<double>(width) / ways;
  return fmt::format("{} {} / {} = {:g} is not a multiple of {}", what, width, ways, part,
                     kSplitMultiple);
}

std::optional<std::string> tensor_parallel_refusal(const ModelConfig& c, int ways) {
  if (c.mla.n_heads % ways != 0)
    return fmt::format("{} heads cannot be shared by {}", c.mla.n_heads, ways);
  if (auto refusal = split_refusal("attention output", c.mla.n_heads * c.mla.v_dim, ways))
    return refusal;
  if (c.n_dense_layers > 0)
    if (auto refusal = split_refusal("dense FFN", c.dense_dim, ways)) return refusal;
  if (c.router.n_experts > 0 && c.n_shared_experts > 0)
    if (auto refusal = split_refusal("shared expert", c.shared_dim(), ways)) return refusal;
  return {};
}

}  // namespace tandem
