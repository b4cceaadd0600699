// What plan() expected of a model as it is placed. A placement's file keeps it beside the
// placement, under "predicted", to stand beside what is measured when the placement runs.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "offload/plan/predict.h"

namespace tandem {

// The mean MoE layer of a step of so many tokens.
struct PlannedLayer {
  double tokens;
  LayerTime time;
};

// Of decoding and of a chunk of a prompt; empty: the file says nothing. Throws Error for wrong
// fields.
std::vector<PlannedLayer> planned_layers(std::string_view placement, const std::string& source);

}  // namespace tandem
