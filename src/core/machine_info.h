// Facts about this machine, for report headers and limits of allocation.
#pragma once
#include <cstdint>
#include <string>

namespace tandem {

struct MachineInfo {
  std::string cpu;  // "AMD EPYC 9654 96-Core Processor"
  int n_sockets;
  int64_t memory_bytes;            // or a container's limit if smaller
  int64_t last_level_cache_bytes;  // sum over all of them; 0 if unknown
};
MachineInfo machine_info();

// Memory available without swapping: MemAvailable, or less in a container with a limit.
int64_t available_memory_bytes();

}  // namespace tandem
