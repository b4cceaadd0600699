// `tandem bench machine`: the measurements that rooflines are based on.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "bench/machine/machine_speed.h"
#include "core/machine.h"

namespace tandem {

// Measures every loop for about `seconds`, with one thread and with all. Fields are listed in
// docs/benchmarks.md; peaks of types without an instruction on this machine are null. The report is
// a machine description for io/machine_json.h. `topology` must cover the whole machine, so query it
// before creating a team.
nlohmann::ordered_json machine_report(const Topology& topology, MachineSpeed& speed,
                                      double seconds);

// Read speed of the disk that holds a model, bypassing the page cache as loading does.
struct DiskSpeed {
  double bytes_per_second = 0;  // 0: not measured
  std::string what;             // what was read, or why nothing was
};

// Reads a file, or the *.safetensors of a folder, for about `seconds`. Throws Error when there are
// none. Call before creating teams: new threads inherit the caller's CPU affinity.
DiskSpeed speed_of_files(const std::string& path, int n_threads, double seconds);

// Reads a temporary file of `bytes` bytes in the folder likewise.
DiskSpeed speed_of_folder(const std::string& folder, int64_t bytes, int n_threads, double seconds);

// The GPUs that this machine's CUDA driver reports, for machines and builds with and without CUDA.
struct GpuInfo {
  std::string name;
  int64_t memory_bytes;
};

struct FoundGpus {
  std::vector<GpuInfo> gpus;
  std::string why_none = {};      // "no CUDA driver"; empty if there are GPUs
  std::optional<Gpu> rates = {};  // of the first GPU, measured
  std::string why_no_rates = {};
};

// Opens the driver's library at run time; the program is not linked to it.
FoundGpus find_gpus(const char* library = "libcuda.so.1");

// Adds disk and GPUs; rates of a GPU that was not measured are null.
void add_disk_and_gpus(nlohmann::ordered_json& report, const DiskSpeed& disk,
                       const FoundGpus& gpus);

std::string machine_text(const nlohmann::ordered_json& report);

}  // namespace tandem
