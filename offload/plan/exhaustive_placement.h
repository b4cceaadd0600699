// Exhaustive search over expert placements, for models with few experts.
#pragma once
#include "offload/plan/predict.h"

namespace tandem {

// Replaces the placement's experts by the assignment with the lowest score among all assignments of
// whole experts to the devices of a single host, if there are at most 10,000. Everything else is
// unchanged, and so are placements with sliced or replicated experts.
void try_all_placements(const PlanInput& input, Placement& placement);

}  // namespace tandem
