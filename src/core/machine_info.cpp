#include "core/machine_info.h"

#include <hwloc.h>
#include <sys/resource.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <memory>
#include <sstream>
#include <vector>

namespace tandem {
namespace {

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

std::string cpu_name(const std::string& root) {
  std::ifstream file(root + "/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (const size_t colon = line.find(": ");
        line.starts_with("model name") && colon != std::string::npos)
      return line.substr(colon + 2);
  return "unknown";
}

// The number after `key` at the start of a line, such as "key: 12 kB" or "key 12", or `missing`.
int64_t number_after(const std::string& path, const std::string& key, int64_t missing) {
  std::ifstream file(path);
  for (std::string word; file >> word; std::getline(file, word))
    if (int64_t number = 0; word == key && file >> number) return number;
  return missing;
}

// The number in a file, or `missing` if there is none or it says "max".
int64_t number_in(const std::string& path, int64_t missing) {
  int64_t number = 0;
  return std::ifstream(path) >> number ? number : missing;
}

int64_t meminfo_bytes(const std::string& root, const std::string& key) {
  return number_after(root + "/proc/meminfo", key + ":", 0) * 1024;
}

// The folders of this process's control group and of those that contain it, of cgroup v2.
std::vector<std::string> control_groups(const std::string& root) {
  std::ifstream file(root + "/proc/self/cgroup");
  std::string own;
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("0::/")) own = line.substr(4);
  std::vector<std::string> folders = {root + "/sys/fs/cgroup"};
  std::istringstream names(own);
  for (std::string name; std::getline(names, name, '/');)
    folders.push_back(folders.back() + "/" + name);
  return folders;
}

// Bytes that a control group may still use. Its page cache is given back when it needs memory.
int64_t bytes_left(const std::string& group) {
  const int64_t limit = number_in(group + "/memory.max", kNoLimit);
  if (limit == kNoLimit) return kNoLimit;
  const std::string stat = group + "/memory.stat";
  const int64_t page_cache =
      number_after(stat, "active_file", 0) + number_after(stat, "inactive_file", 0);
  const int64_t used = number_in(group + "/memory.current", 0) - page_cache;
  return std::clamp<int64_t>(limit - used, 0, limit);
}

}  // namespace

MachineInfo machine_info(const std::string& root) {
  hwloc_topology_t topology = nullptr;
  hwloc_topology_init(&topology);
  const std::unique_ptr<hwloc_topology, decltype(&hwloc_topology_destroy)> owner(
      topology, hwloc_topology_destroy);
  hwloc_topology_load(topology);
  MachineInfo info{.cpu = cpu_name(root),
                   .n_sockets = std::max(1, hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_PACKAGE)),
                   .memory_bytes = meminfo_bytes(root, "MemTotal"),
                   .last_level_cache_bytes = 0};
  for (hwloc_obj_t cache = nullptr;
       (cache = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_L3CACHE, cache));)
    info.last_level_cache_bytes += static_cast<int64_t>(cache->attr->cache.size);
  for (const std::string& group : control_groups(root))
    info.memory_bytes = std::min(info.memory_bytes, number_in(group + "/memory.max", kNoLimit));
  return info;
}

int64_t available_memory_bytes(const std::string& root) {
  int64_t bytes = meminfo_bytes(root, "MemAvailable");
  for (const std::string& group : control_groups(root)) bytes = std::min(bytes, bytes_left(group));
  return bytes;
}

size_t raise_file_limit() {
  struct rlimit limit {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return 1024;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
  getrlimit(RLIMIT_NOFILE, &limit);
  return limit.rlim_cur;
}

}  // namespace tandem
