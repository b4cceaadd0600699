// Where the routed experts are once a model is loaded, for statistics.
#pragma once
#include "model/config.h"
#include "offload/parts/executed_parts.h"
#include "scheduling/expert_loads.h"

namespace tandem {

// `parts` of any rank; all ranks that it numbers are those of the grid.
ExpertHomes expert_homes(const ModelConfig& config, const ExecutedParts& parts);

}  // namespace tandem
