#include "loader/weights/standby_experts.h"

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "core/memory.h"
#include "loader/weights/pack_weights.h"
#include "offload/workers/shards.h"

namespace tandem {

ModelWeights no_experts(ModelWeights& stored, const ModelConfig& config, const CpuWeights& home,
                        const ExpertsLayout& layout) {
  ModelWeights weights;
  weights.slices = expert_slices(stored, config, home, layout);
  weights.share = layout.elsewhere().share;
  for_each_weight(weights, config, [](const WeightSpec&, QuantView&) {});
  return weights;
}

StandbyExperts::StandbyExperts(StandbyParts parts)
    : p_(std::move(parts)), expert_bytes_([this] {
        ExpertsOfLayers one(p_.config.n_all_layers(),
                            std::vector<bool>(p_.config.router.n_experts));
        for (std::vector<bool>& of_layer : one) of_layer[0] = true;
        const CpuWeights home(p_.plan.layout.kernels, p_.topology);
        return packed_bytes(p_.stored, p_.config, home, layout_of(one));
      }()) {}

int StandbyExperts::n_fitting() const {
  return static_cast<int>(
      std::min<int64_t>(p_.config.router.n_experts, p_.free_bytes() / expert_bytes_));
}

void StandbyExperts::begin(const ExpertsOfLayers& experts) {
  check(progress().state == State::kIdle, "one load at a time");
  experts_ = experts;
  load_.begin([this](const LoadProgress& progress) { load(progress); });
}

void StandbyExperts::load(const LoadProgress& progress) {
  const CpuWeights empty(p_.plan.layout.kernels, p_.topology);
  const int64_t needed = packed_bytes(p_.stored, p_.config, empty, layout_of(experts_));
  const int64_t free = p_.free_bytes();
  require(needed <= free, "experts {} need {:.2f} GB of memory, and {:.2f} GB are free",
          text_of_layers(experts_), gigabytes(needed), gigabytes(free));
  LoadPlan plan = p_.plan;
  plan.layout.experts = layout_of(experts_);
  plan.progress = progress;
  home_ = std::make_unique<CpuWeights>(plan.layout.kernels, p_.topology);
  loaded_ = load_weights(p_.store, p_.stored, p_.config, plan, *home_).weights;
}

void StandbyExperts::finish() {
  const std::string failure = load_.end();
  std::unique_ptr<CpuWeights> home = std::move(home_);
  const ModelWeights loaded = std::exchange(loaded_, {});
  require(failure.empty(), "{}", failure);
  homes_.push_back(std::move(home));
  const size_t n_experts = p_.config.router.n_experts;
  for (size_t l = 0; l < loaded.layers.size(); ++l) {
    const std::vector<FfnWeights>& from = loaded.layers[l].experts;
    std::vector<FfnWeights>& to = p_.weights.layers[l].experts;
    check(from.size() == to.size(), "experts in the same slices");
    for (size_t i = 0; i < from.size(); ++i)
      if (experts_[l][i % n_experts]) to[i] = from[i];
  }
}

ExpertsLayout StandbyExperts::layout_of(const ExpertsOfLayers& experts) const {
  Elsewhere elsewhere = p_.plan.layout.experts.elsewhere();
  for (size_t l = 0; l < elsewhere.experts.size(); ++l) {
    if (elsewhere.experts[l].empty()) continue;
    elsewhere.experts[l] = experts[l];
    elsewhere.experts[l].flip();
  }
  ExpertsLayout layout = p_.plan.layout.experts;
  layout.keep_elsewhere(std::move(elsewhere));
  return layout;
}

}  // namespace tandem
