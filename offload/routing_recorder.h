// Counts which experts the routers of the model's layers choose.
#pragma once
#include <span>
#include <vector>

#include "model/config.h"
#include "offload/plan/workload.h"
#include "ops/expert_pool.h"

namespace tandem {

// Counts how often each expert is chosen, and how many different ones neighbouring tokens choose.
class RoutingCounter {
 public:
  explicit RoutingCounter(const ModelConfig& config) : counts_(config), recent_(config.n_layers) {}
  // ids: [tokens, n_active] in host memory, those that follow the layer's last ones.
  void add(int layer, const TensorView& ids);
  int n_layers() const { return static_cast<int>(recent_.size()); }
  const RoutingCounts& counts() const { return counts_; }

 private:
  void count_windows(std::span<const int32_t> recent, int64_t n_active);

  RoutingCounts counts_;
  std::vector<std::vector<int32_t>> recent_;  // [layers] ids of the last tokens, newest last
  std::vector<int64_t> seen_by_;              // [experts] the last window that has the expert
  int64_t n_windows_ = 0;
};

class RoutingRecorder final : public ExpertObserver {
 public:
  explicit RoutingRecorder(const ModelConfig& config) : counter_(config) {}
  void submitted(const ExpertBatch& batch) override {
    if (batch.layer < counter_.n_layers()) counter_.add(batch.layer, batch.routing.ids);
  }
  const RoutingCounts& counts() const { return counter_.counts(); }

 private:
  RoutingCounter counter_;
};

}  // namespace tandem
