// The loader of a worker whose experts move: reads experts of its checkpoint into spare memory
// beside those that it computes, and takes the memory of those that it gives away.
#pragma once
#include <memory>
#include <vector>

#include "loader/weights/background_load.h"
#include "loader/weights/spare_experts.h"
#include "offload/workers/expert_loader.h"

namespace tandem {

class MovingExperts final : public ExpertLoader {
 public:
  // The model is that of the spare memory, and is what the worker computes from. References outlive
  // the object.
  MovingExperts(std::unique_ptr<SpareExperts> spare, const ModelConfig& config,
                ModelWeights& weights, int n_threads)
      : spare_(std::move(spare)), c_(config), weights_(weights), n_threads_(n_threads) {}

  void begin(const ExpertsOfLayers& experts) override;
  Progress progress() const override { return load_.progress(); }
  void finish() override;
  bool has_room(const ExpertsOfLayers& experts) const override;
  void drop(const ExpertsOfLayers& experts) override;

 private:
  std::vector<ExpertId> ids_of(const ExpertsOfLayers& experts) const;

  const std::unique_ptr<SpareExperts> spare_;
  const ModelConfig& c_;
  ModelWeights& weights_;
  const int n_threads_;
  BackgroundLoad load_;  // the last member
};

}  // namespace tandem
