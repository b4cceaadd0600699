// What the owners of a layer's experts have to do in one step, by expectation.
#pragma once
#include <vector>

#include "offload/plan/predict.h"
#include "offload/plan/rates.h"

namespace tandem {

struct ExpertLoad {
  DeviceId owner;
  double experts = 0;             // it holds
  double used = 0, variance = 0;  // of them in this step: expected number, and its variance
  double bytes = 0;               // of those, expected
  double op_seconds = 0;          // at the peak of the owner's arithmetic
  double stream_op_seconds = 0;   // at that of the backbone's GPU
  double rows = 0;                // of tokens
  DType format = DType::kBF16;    // of the last group: chooses the efficiency curve
};

// In the order in which the groups name the owners. Replicas share an expert's tokens.
std::vector<ExpertLoad> expert_loads(const PlanInput& input, const Placement& placement,
                                     const LayerExperts& experts, int layer, double tokens,
                                     DeviceId backbone);

// Whether two owners have the same to do.
bool alike(const ExpertLoad& a, const ExpertLoad& b);

// Of the busiest of `n_alike` owners whose expected load is `load`.
double busiest_seconds(const Rates& rates, const ExpertLoad& load, int n_alike);

}  // namespace tandem
