// The prediction of plan() for a placement. A placement file stores it under "predicted", for
// comparison with measurements when the placement runs.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "offload/plan/predict.h"

namespace tandem {

// The mean MoE layer of a step of `tokens` tokens.
struct PlannedLayer {
  double tokens;
  LayerTime time;
};

// The layers of a decode step and of a prefill chunk; empty if the file has no prediction. Throws
// Error for wrong fields.
std::vector<PlannedLayer> planned_layers(std::string_view placement, const std::string& source);

}  // namespace tandem
