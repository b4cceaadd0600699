#include "core/machine_info.h"

#include <hwloc.h>

#include <algorithm>
#include <fstream>
#include <limits>

namespace tandem {
namespace {

std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (const size_t colon = line.find(": ");
        line.starts_with("model name") && colon != std::string::npos)
      return line.substr(colon + 2);
  return "unknown";
}

// The number after `key` in a file of lines "key: number kB", in bytes; -1 if missing.
int64_t kilobytes(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);)
    if (line.starts_with(key + ":")) return std::stoll(line.substr(key.size() + 1)) * 1024;
  return -1;
}

// The number in a control group's file, or `missing` if there is none or it says "max".
int64_t group_limit(const std::string& path, int64_t missing) {
  int64_t bytes = 0;
  return std::ifstream(path) >> bytes ? bytes : missing;
}

}  // namespace

MachineInfo machine_info() {
  hwloc_topology_t topology = nullptr;
  hwloc_topology_init(&topology);
  hwloc_topology_load(topology);
  constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();
  MachineInfo info{.cpu = cpu_name(),
                   .n_sockets = std::max(1, hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_PACKAGE)),
                   .memory_bytes = std::min(group_limit("/sys/fs/cgroup/memory.max", kNoLimit),
                                            kilobytes("/proc/meminfo", "MemTotal")),
                   .last_level_cache_bytes = 0};
  for (hwloc_obj_t cache = nullptr;
       (cache = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_L3CACHE, cache));)
    info.last_level_cache_bytes += static_cast<int64_t>(cache->attr->cache.size);
  hwloc_topology_destroy(topology);
  return info;
}

int64_t available_memory_bytes() {
  constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();
  const int64_t limit = group_limit("/sys/fs/cgroup/memory.max", kNoLimit);
  const int64_t used = group_limit("/sys/fs/cgroup/memory.current", 0);
  const int64_t left = limit == kNoLimit ? kNoLimit : std::max<int64_t>(0, limit - used);
  return std::min(left, kilobytes("/proc/meminfo", "MemAvailable"));
}

}  // namespace tandem
