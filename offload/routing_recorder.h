// Counts which experts the routers of the model's layers choose.
#pragma once
#include "model/config.h"
#include "offload/plan/workload.h"
#include "ops/expert_pool.h"

namespace tandem {

// Adds to counts[expert] how often a token chose it. ids: [tokens, n_active] in host memory.
void count_choices(const TensorView& ids, std::vector<int64_t>& counts);

class RoutingRecorder final : public ExpertObserver {
 public:
  explicit RoutingRecorder(const ModelConfig& config) : counts_(config) {}
  void submitted(const ExpertBatch& batch) override {
    if (batch.layer < std::ssize(counts_.of_layer))
      count_choices(batch.routing.ids, counts_.of_layer[batch.layer]);
  }
  const RoutingCounts& counts() const { return counts_; }

 private:
  RoutingCounts counts_;
};

}  // namespace tandem
