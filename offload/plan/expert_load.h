// Expected load of the owners of a layer's experts in one step.
#pragma once
#include <vector>

#include "offload/plan/predict.h"
#include "offload/plan/rates.h"

namespace tandem {

struct ExpertLoad {
  DeviceId owner;
  double experts = 0;             // number held
  double used = 0, variance = 0;  // expected number used in this step, and its variance
  double bytes = 0;               // of used experts, expected
  double op_seconds = 0;          // at the owner's arithmetic peak
  double stream_op_seconds = 0;   // at the arithmetic peak of the backbone's GPU
  double rows = 0;                // expected token rows
  DType format = DType::kBF16;    // of the last group; selects the efficiency curve
};

// Loads in the order in which the groups name the owners. Replicas share an expert's tokens.
std::vector<ExpertLoad> expert_loads(const PlanInput& input, const Placement& placement,
                                     const LayerExperts& experts, int layer, double tokens,
                                     DeviceId backbone);

// True if two owners are of one kind and have equal loads.
bool alike(const ExpertLoad& a, const ExpertLoad& b);

// Expected seconds of the busiest of `n_alike` owners whose expected load is `load`.
double busiest_seconds(const Rates& rates, const ExpertLoad& load, int n_alike);

}  // namespace tandem
