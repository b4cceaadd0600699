// A placement's decisions in words, each with the numbers that speak for it: what the other choice
// would cost is predicted, not remembered.
#pragma once
#include "offload/plan/predict.h"

namespace tandem {

std::vector<std::string> reasons_in_words(const PlanInput& input, const Placement& placement,
                                          const Prediction& prediction);

// "decode: reading experts from host0.cpu at 491 GB/s takes 41.2 of 58.0 ms a step"
std::string limit_in_words(const PlanInput& input, const Placement& placement,
                           const Prediction& prediction);

}  // namespace tandem
