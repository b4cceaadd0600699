// Facts about this machine, for report headers and limits of allocation.
#pragma once
#include <cstdint>
#include <string>

namespace tandem {

struct MachineInfo {
  std::string cpu;  // "AMD EPYC 9654 96-Core Processor"
  int n_sockets;
  int64_t memory_bytes;            // or the limit of a control group if smaller
  int64_t last_level_cache_bytes;  // sum over all of them; 0 if unknown
};
// `root` precedes the paths of /proc and /sys that are read, for tests; caches and sockets are
// always this machine's.
MachineInfo machine_info(const std::string& root = {});

// Memory available without swapping: MemAvailable, or what the control groups of this process (a
// container's, or a systemd unit's; version 1 or 2) leave, if that is less. Page cache counts as
// available.
int64_t available_memory_bytes(const std::string& root = {});

// The processor time that the control groups of this process allow, in cores: 1.5 for `docker run
// --cpus 1.5`, limits of Kubernetes or systemd's CPUQuota=150%; infinity without a limit.
double processor_quota(const std::string& root = {});

// Raises the limit of open files to its maximum and returns it. Every connection is an open file,
// and the usual soft limit of 1024 is too low for many.
size_t raise_file_limit();

}  // namespace tandem
