// JSON form of a placement for reading and editing (docs/planner_files.md lists the fields).
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "offload/plan/placement.h"

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

}  // namespace tandem
