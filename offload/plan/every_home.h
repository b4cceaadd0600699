// Models of so few experts that every home of each can be tried.
#pragma once
#include "offload/plan/predict.h"

namespace tandem {

// The experts of a placement where the score is least, of all ways to give each to one device of
// the only host, where these are few; all else stays. Experts that are sliced or copied stay, too.
void try_every_home(const PlanInput& input, Placement& placement);

}  // namespace tandem
