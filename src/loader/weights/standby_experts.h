// The loader of a standby: reads experts of an opened checkpoint beside those that are computed.
#pragma once
#include <functional>
#include <memory>
#include <vector>

#include "io/weight_store.h"
#include "loader/weights/background_load.h"
#include "loader/weights/load_weights.h"
#include "offload/workers/expert_loader.h"

namespace tandem {

struct StandbyParts {
  const WeightStore& store;
  ModelWeights& stored;  // stored_weights() of it, which nothing else uses
  const ModelConfig& config;
  const Topology& topology;
  LoadPlan plan;          // whose layout keeps no experts; its `progress` is not called
  ModelWeights& weights;  // of the model that is computed: finish() adds to them
  std::function<int64_t()> free_bytes;  // memory that a load may use, as it begins
};

// No weights yet, in the slices and of the size that those of experts in this layout have.
ModelWeights no_experts(ModelWeights& stored, const ModelConfig& config, const CpuWeights& home,
                        const ExpertsLayout& layout);

class StandbyExperts final : public ExpertLoader {
 public:
  // References outlive the object.
  explicit StandbyExperts(StandbyParts parts);

  // Bytes of one expert of every layer, and how many of them fit the free memory.
  int64_t expert_bytes() const { return expert_bytes_; }
  int n_fitting() const;

  void begin(const ExpertsOfLayers& experts) override;
  Progress progress() const override { return load_.progress(); }
  void finish() override;

 private:
  void load(const LoadProgress& progress);
  ExpertsLayout layout_of(const ExpertsOfLayers& experts) const;

  StandbyParts p_;
  const int64_t expert_bytes_;
  std::vector<std::unique_ptr<CpuWeights>> homes_;  // of the loads so far
  // What the thread of a load has to itself, until it has ended.
  ExpertsOfLayers experts_;
  std::unique_ptr<CpuWeights> home_;
  ModelWeights loaded_;

  BackgroundLoad load_;  // the last member
};

}  // namespace tandem
