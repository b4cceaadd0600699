// `tandem bench machine`: what a roofline is made of.
#pragma once
#include <nlohmann/json.hpp>

#include "bench/machine_speed.h"

namespace tandem {

// Measures every loop for about `seconds` with one thread and with all. Fields as in
// docs/benchmarks.md; peaks of types that the machine has no instruction for are null. It is a
// machine's description as io/machine_json.h reads it.
nlohmann::ordered_json machine_report(MachineSpeed& speed, double seconds);

std::string machine_text(const nlohmann::ordered_json& report);

}  // namespace tandem
