// `tandem bench machine`: what a roofline is made of.
#pragma once
#include <nlohmann/json.hpp>

#include "bench/disk_speed.h"
#include "bench/gpu_info.h"
#include "bench/machine_speed.h"

namespace tandem {

// Measures every loop for about `seconds` with one thread and with all. Fields as in
// docs/benchmarks.md; peaks of types that the machine has no instruction for are null. It is a
// machine's description as io/machine_json.h reads it.
// `topology`: all of this machine, asked before there was a team.
nlohmann::ordered_json machine_report(const Topology& topology, MachineSpeed& speed,
                                      double seconds);

// What is known of disk and GPUs; rates of a GPU that was not measured are null.
void add_disk_and_gpus(nlohmann::ordered_json& report, const DiskSpeed& disk,
                       const FoundGpus& gpus);

std::string machine_text(const nlohmann::ordered_json& report);

}  // namespace tandem
