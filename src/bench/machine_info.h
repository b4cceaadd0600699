// What this machine is: facts that head a report or bound what may be allocated.
#pragma once
#include <cstdint>
#include <string>

namespace tandem {

struct MachineInfo {
  std::string cpu;  // "AMD EPYC 9654 96-Core Processor"
  int n_sockets;
  int64_t memory_bytes;            // or a container's limit if that is less
  int64_t last_level_cache_bytes;  // all of them together; 0 if unknown
};
MachineInfo machine_info();

// Memory that can be taken without swapping: MemAvailable, or less in a container with a limit.
int64_t available_memory_bytes();

}  // namespace tandem
