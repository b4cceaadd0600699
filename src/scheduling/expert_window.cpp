#include "scheduling/expert_window.h"

#include <algorithm>

#include "core/check.h"

namespace tandem {
namespace {

constexpr int kBlocks = 8;  // of a window

}  // namespace

ExpertWindow::ExpertWindow(const ModelConfig& config, int n_steps, std::span<const uint32_t> counts)
    : config_(config),
      n_steps_(n_steps),
      n_steps_of_block_(std::max(n_steps / kBlocks, 1)),
      last_(counts.begin(), counts.end()) {
  check(n_steps >= 1 && n_steps <= kMaxSteps, "steps of a window");
  now_.counts.resize(counts.size());
  marks_.push_back(now_);
}

void ExpertWindow::add_step(int n_tokens) {
  ++now_.n_steps;
  now_.n_tokens += n_tokens;
}

void ExpertWindow::read(std::span<const uint32_t> counts) {
  check(counts.size() == last_.size(), "a count for each expert of each layer");
  for (size_t i = 0; i < counts.size(); ++i) now_.counts[i] += uint32_t{counts[i] - last_[i]};
  std::ranges::copy(counts, last_.begin());
  n_steps_read_ = now_.n_steps;
  if (is_due()) marks_.push_back(now_);
  while (now_.n_steps - marks_.front().n_steps > n_steps_) marks_.pop_front();
}

ExpertUses ExpertWindow::uses() const {
  const Mark& first = marks_.front();
  const int n_experts = config_.router.n_experts;
  ExpertUses uses{.n_steps = now_.n_steps - first.n_steps,
                  .n_tokens = now_.n_tokens - first.n_tokens};
  uses.of_layer.resize(config_.n_all_layers());
  for (int layer = 0; layer < config_.n_all_layers(); ++layer) {
    if (!config_.is_moe(layer)) continue;
    for (int i = layer * n_experts; i < (layer + 1) * n_experts; ++i)
      uses.of_layer[layer].push_back(now_.counts[i] - first.counts[i]);
  }
  return uses;
}

}  // namespace tandem
