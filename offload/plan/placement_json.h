// JSON form of a placement for reading and editing (docs/planner_files.md lists the fields).
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "offload/plan/placement.h"
#include "offload/plan/predict.h"

namespace tandem {

nlohmann::ordered_json placement_to_json(const Placement& placement);

// Throws Error for broken JSON and for a missing, unknown or wrong field. check_placement() checks
// whether the placement suits a model and a machine.
Placement placement_from_json(std::string_view text, const std::string& source);
Placement placement_from_file(const std::string& path);
constexpr int64_t kMaxPlacementBytes = 64 << 20;  // size limit of a file

// Converts between 0, 1, 2, 3, 7 and "0-3,7". Numbers ascend and are below `end`.
std::string ranges_text(const std::vector<int>& numbers);
std::vector<int> parse_ranges(const std::string& text, int end, const std::string& where);

// The prediction of plan() for a placement. A placement file stores it under "predicted", for
// comparison with measurements when the placement runs.
// The mean MoE layer of a step of `tokens` tokens.
struct PlannedLayer {
  double tokens;
  LayerTime time;
};

// The layers of a decode step and of a prefill chunk; empty if the file has no prediction. Throws
// Error for wrong fields.
std::vector<PlannedLayer> planned_layers(std::string_view placement, const std::string& source);

}  // namespace tandem
