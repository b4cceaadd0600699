// A machine as JSON: the files of machines/ and what `tandem bench machine --json` prints have one
// form (docs/planner.md lists the fields).
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "core/machine.h"

namespace tandem {

// Throws Error for a missing, unknown, zero, negative or contradictory figure, naming the field and
// what is expected. `source` stands for the file in messages.
Machine machine_from_json(std::string_view text, const std::string& source);
Machine machine_from_file(const std::string& path);

// An entry of `gpus`.
nlohmann::ordered_json gpu_to_json(const Gpu& gpu);

// What machine_from_json() reads, and of it the field `efficiency`.
nlohmann::ordered_json machine_to_json(const Machine& machine);
nlohmann::ordered_json curves_to_json(const std::vector<EfficiencyCurve>& curves);

}  // namespace tandem
