// Explains a placement's decisions, each with numbers: the cost of every alternative is predicted.
#pragma once
#include "offload/plan/assigned_experts.h"
#include "offload/plan/predict.h"

namespace tandem {

inline double milli(double seconds) { return seconds * 1e3; }

std::vector<std::string> reasons_in_words(const PlanInput& input, const Placement& placement,
                                          const Prediction& prediction);

// "decode: reading experts from host0.cpu at 491 GB/s takes 41.2 of 58.0 ms a step"
std::string limit_in_words(const PlanInput& input, const Placement& placement,
                           const Prediction& prediction);

// How evenly the ranks' experts are used, and what both assignments reach.
std::string balance_in_words(const PlacedBalance& balance);

}  // namespace tandem
