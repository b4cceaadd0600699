#include "offload/cpu_experts.h"

#include <algorithm>

#include "ops/cpu_weights.h"

namespace tandem {

CpuExperts::CpuExperts(const cpu::KernelTable& kernels, const ModelConfig& config,
                       const ModelWeights& weights, int max_tokens, Team& team)
    : kernels_(kernels),
      c_(config),
      w_(weights),
      team_(team),
      n_items_(team.n_nodes()),
      first_of_(config.router.n_experts + 1) {
  check(std::max<int64_t>(1, std::ssize(weights.slices)) == team.n_nodes(),
        "experts are sliced for another team");
  const int64_t pairs = int64_t{max_tokens} * config.router.n_active;
  pairs_.tokens.resize(pairs);
  pairs_.weights.resize(pairs);
  pairs_.groups.reserve(config.router.n_experts + pairs / kGroupTokens);
  for (int node = 0; node < team.n_nodes(); ++node)
    slices_.push_back(
        std::make_unique<ExpertSlice>(kernels, config, weights, max_tokens, team, node));
}

std::vector<cpu::ActivationType> CpuExperts::activations() const {
  std::vector<cpu::ActivationType> types(w_.layers.size(), cpu::ActivationType::kF32);
  for (size_t l = 0; l < types.size(); ++l)
    for (const FfnWeights& expert : w_.layers[l].experts)
      if (!expert.gate.empty()) types[l] = activation_for(kernels_, expert.gate.q.dtype);
  return types;
}

Ticket CpuExperts::start(const ExpertBatch& batch) {
  check(!is_submitted_, "the CPU experts have one ticket");
  begin(batch);
  compute_below(c_.router.n_experts);
  is_submitted_ = true;
  return 0;
}

void CpuExperts::begin(const ExpertBatch& batch) {
  n_tokens_ = static_cast<int>(batch.x.rows);
  n_computed_ = 0;
  group_by_expert(batch);
  for (const auto& slice : slices_) slice->begin(batch, pairs_);
}

void CpuExperts::compute_below(int expert) {
  const std::span<const ExpertPairs::Group> rest = std::span(pairs_.groups).subspan(n_computed_);
  const auto end = std::find_if(rest.begin(), rest.end(), [&](const ExpertPairs::Group& group) {
    return group.expert >= expert;
  });
  const auto groups = rest.first(end - rest.begin());
  if (groups.empty() && n_computed_ > 0) return;
  n_computed_ += groups.size();
  for (size_t node = 0; node < slices_.size(); ++node) n_items_[node] = slices_[node]->take(groups);
  team_.run_on_nodes(n_items_,
                     [&](int node, int64_t item, int thread) { slices_[node]->run(item, thread); });
}

void CpuExperts::add_to(Ticket, TensorView y) {
  is_submitted_ = false;
  team_.run(n_tokens_, [&](int64_t t, int) {
    for (const auto& slice : slices_) {
      if (slice->is_empty()) continue;
      float* to = y.row<float>(t);
      const float* from = slice->sum().row<float>(t);
      for (int64_t i = 0; i < y.cols; ++i) to[i] += from[i];
    }
  });
}

// Counting sort of the (token, expert) pairs by expert; tokens stay in order.
void CpuExperts::group_by_expert(const ExpertBatch& batch) {
  const int n_active = c_.router.n_active;
  std::fill(first_of_.begin(), first_of_.end(), 0);
  for (int t = 0; t < n_tokens_; ++t)
    for (int k = 0; k < n_active; ++k) {
      const int32_t id = batch.routing.ids.row<int32_t>(t)[k];
      if (id >= 0) ++first_of_[id + 1];
    }
  for (size_t e = 1; e < first_of_.size(); ++e) first_of_[e] += first_of_[e - 1];

  pairs_.groups.clear();
  for (int e = 0; e < c_.router.n_experts; ++e)
    for (int first = first_of_[e]; first < first_of_[e + 1]; first += kGroupTokens)
      pairs_.groups.push_back({e, first, std::min(kGroupTokens, first_of_[e + 1] - first)});

  for (int t = 0; t < n_tokens_; ++t)
    for (int k = 0; k < n_active; ++k) {
      const int32_t id = batch.routing.ids.row<int32_t>(t)[k];
      if (id < 0) continue;
      const int at = first_of_[id]++;
      pairs_.tokens[at] = t;
      pairs_.weights[at] = batch.routing.weights.row<float>(t)[k];
    }
}

}  // namespace tandem
