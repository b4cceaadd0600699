// The GPUs that this machine's CUDA driver reports, for machines and builds with and without CUDA.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/machine.h"

namespace tandem {

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

}  // namespace tandem
