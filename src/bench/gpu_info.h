// Which GPUs the CUDA driver of this machine knows, for machines and builds with and without it.
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
  std::string why_none = {};      // "no CUDA driver"; empty when there are some
  std::optional<Gpu> rates = {};  // of the first one, as measured
  std::string why_no_rates = {};
};

// Opens the driver's library; nothing of this program is linked to it.
FoundGpus find_gpus(const char* library = "libcuda.so.1");

}  // namespace tandem
