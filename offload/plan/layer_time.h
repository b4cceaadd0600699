// One layer's parts in seconds; predict.cpp adds them up.
#pragma once
#include "offload/plan/expert_load.h"
#include "offload/plan/predict.h"
#include "offload/plan/rates.h"

namespace tandem {

// Of one placement and one shape of step.
class LayerModel {
 public:
  LayerModel(const PlanInput& input, const Placement& placement, StepShape shape);
  // `experts`: null in a dense layer.
  LayerTime layer(const Stage& stage, int layer, const LayerExperts* experts) const;
  // The same without routed experts and what belongs to them.
  LayerTime backbone(const Stage& stage, int layer) const;

 private:
  // Experts of one layer as the busiest device of each kind sees them.
  struct ExpertTimes {
    double own = 0;    // on devices of the backbone
    double other = 0;  // elsewhere
    double gpu = 0, cpu = 0;
    // Of the CPU's experts in a streamed chunk, were they all brought to the GPUs: the link's time,
    // the CPU's for copying them to pinned memory, the GPUs' for computing them; and the CPU's, did
    // it compute them all. n: experts.
    struct {
      double n = 0, link = 0, copy = 0, gpu = 0, cpu = 0;
    } streamed;
    double to_cpu = 0, to_near = 0, to_far = 0;  // parts of a replica's tokens that leave it
    int n_owners = 1;
    bool sliced = false;
  };
  LayerTime chain(const Stage& stage, int layer, const LayerExperts* experts, double tokens) const;
  LayerTime overlapped(const Stage& stage, int layer, const LayerExperts* experts,
                       double tokens) const;
  void add_backbone(const Stage& stage, int layer, double tokens, LayerTime& t) const;
  ExpertTimes expert_times(const Stage& stage, int layer, const LayerExperts& experts,
                           double tokens) const;
  void add_streamed(const Stage& stage, const ExpertLoad& load, const Rates& cpu,
                    ExpertTimes& e) const;
  static void add_divided(const ExpertTimes& e, LayerTime& t);
  void add_ways(const Stage& stage, const std::vector<ExpertLoad>& loads, ExpertTimes& e) const;
  double exchange_seconds(const Stage& stage, const ExpertTimes& e, double tokens) const;
  double all_reduce_seconds(const Stage& stage, double tokens) const;

  const PlanInput& in_;
  const Placement& p_;
  const StepShape shape_;
};

// Whether a chunk's experts are brought to the GPU.
bool streams(const Placement& placement, double chunk_tokens);

double embedding_seconds(const PlanInput& input, const Placement& placement, double tokens);
// `rows` of logits in each of `n_replicas`.
double head_seconds(const PlanInput& input, const Placement& placement, double rows,
                    double n_replicas);
// Handing a step's tokens from stage to stage.
double pipeline_seconds(const PlanInput& input, const Placement& placement, double tokens);

}  // namespace tandem
