// `tandem bench machine`: the measurements that rooflines are based on.
#pragma once
#include <nlohmann/json.hpp>

#include "bench/disk_speed.h"
#include "bench/gpu_info.h"
#include "bench/machine_speed.h"

namespace tandem {

// Measures every loop for about `seconds`, with one thread and with all. Fields are listed in
// docs/benchmarks.md; peaks of types without an instruction on this machine are null. The report is
// a machine description for io/machine_json.h. `topology` must cover the whole machine, so query it
// before creating a team.
nlohmann::ordered_json machine_report(const Topology& topology, MachineSpeed& speed,
                                      double seconds);

// Adds disk and GPUs; rates of a GPU that was not measured are null.
void add_disk_and_gpus(nlohmann::ordered_json& report, const DiskSpeed& disk,
                       const FoundGpus& gpus);

std::string machine_text(const nlohmann::ordered_json& report);

}  // namespace tandem
