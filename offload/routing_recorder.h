// Counts which experts the router chooses, on the way to whoever computes them. Who does not record
// does without it.
#pragma once
#include "model/config.h"
#include "offload/plan/workload.h"
#include "ops/experts.h"

namespace tandem {

// counts[expert] += how often a token chose it. ids: [tokens, n_active]
void count_choices(const TensorView& ids, std::vector<int64_t>& counts);

class RoutingRecorder final : public RoutedExperts {
 public:
  // References outlive the object.
  RoutingRecorder(const ModelConfig& config, RoutedExperts& experts);

  void submit(const ExpertBatch& batch) override;
  void add_to(TensorView y) override { experts_.add_to(y); }
  void add_rest_to(int layer, int first_row, TensorView y) override {
    experts_.add_rest_to(layer, first_row, y);
  }
  bool wants_halves(int n_sequences) const override { return experts_.wants_halves(n_sequences); }
  void follow(const StepParts& step) override { experts_.follow(step); }

  const RoutingCounts& counts() const { return counts_; }

 private:
  RoutedExperts& experts_;
  RoutingCounts counts_;
};

}  // namespace tandem
