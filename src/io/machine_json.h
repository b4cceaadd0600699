// Reads and writes a machine as JSON. The files of machines/ and the output of `tandem bench
// machine --json` have the same format (docs/planner_files.md lists the fields).
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "core/machine.h"

namespace tandem {

// Throws Error for a missing, unknown, zero, negative or contradictory figure, naming the field and
// what is expected. `source` stands for the file in messages.
Machine machine_from_json(std::string_view text, const std::string& source);
Machine machine_from_file(const std::string& path);

// An entry of the field `gpus`.
nlohmann::ordered_json gpu_to_json(const Gpu& gpu);

// The JSON that machine_from_json() reads, and the value of its field `efficiency`.
nlohmann::ordered_json machine_to_json(const Machine& machine);
nlohmann::ordered_json curves_to_json(const std::vector<EfficiencyCurve>& curves);

}  // namespace tandem
