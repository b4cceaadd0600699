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

// The folders of this process's control group and of those that contain it, in the hierarchy that
// is mounted at `mount`. `controller` is its name in /proc/self/cgroup; version 2 has none. In a
// container the mount itself is often the group, whatever path the kernel states.
std::vector<std::string> control_groups(const std::string& root, const std::string& mount,
                                        const std::string& controller) {
  std::ifstream file(root + "/proc/self/cgroup");
  std::string own;
  // "4:cpu,cpuacct:/docker/1f", or for version 2 "0::/docker/1f".
  for (std::string line; std::getline(file, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string names = "," + line.substr(first + 1, second - first - 1) + ",";
    if (names.find("," + controller + ",") != std::string::npos) own = line.substr(second + 1);
  }
  std::vector<std::string> folders = {root + mount};
  std::istringstream names(own);
  for (std::string name; std::getline(names, name, '/');)
    if (!name.empty()) folders.push_back(folders.back() + "/" + name);
  return folders;
}

// The names of a group's files and of the rows of its memory.stat in one version of control groups.
struct MemoryFiles {
  const char* mount;
  const char* controller;
  const char* limit;
  const char* used;
  const char* active_file;
  const char* inactive_file;
};
constexpr MemoryFiles kMemoryFiles[] = {
    {"/sys/fs/cgroup", "", "memory.max", "memory.current", "active_file", "inactive_file"},
    {"/sys/fs/cgroup/memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
     "total_active_file", "total_inactive_file"}};

// Bytes that a control group may still use. Its page cache is given back when it needs memory.
int64_t bytes_left(const std::string& group, const MemoryFiles& files) {
  const int64_t limit = number_in(group + "/" + files.limit, kNoLimit);
  if (limit == kNoLimit) return kNoLimit;
  const std::string stat = group + "/memory.stat";
  const int64_t page_cache =
      number_after(stat, files.active_file, 0) + number_after(stat, files.inactive_file, 0);
  // The statistics lag behind, so the page cache may exceed what is used.
  const int64_t used = std::max<int64_t>(number_in(group + "/" + files.used, 0) - page_cache, 0);
  return std::max<int64_t>(limit - used, 0);
}

double cores_of(int64_t quota, int64_t period) {
  return quota > 0 && period > 0 ? static_cast<double>(quota) / static_cast<double>(period)
                                 : std::numeric_limits<double>::infinity();
}

// "150000 100000" or "max 100000": microseconds of processor time in a period.
double quota_in(const std::string& path) {
  int64_t quota = 0, period = 0;
  std::ifstream file(path);
  return file >> quota >> period ? cores_of(quota, period) : cores_of(0, 0);
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
  for (const MemoryFiles& files : kMemoryFiles)
    for (const std::string& group : control_groups(root, files.mount, files.controller))
      info.memory_bytes =
          std::min(info.memory_bytes, number_in(group + "/" + files.limit, kNoLimit));
  return info;
}

int64_t available_memory_bytes(const std::string& root) {
  int64_t bytes = meminfo_bytes(root, "MemAvailable");
  for (const MemoryFiles& files : kMemoryFiles)
    for (const std::string& group : control_groups(root, files.mount, files.controller))
      bytes = std::min(bytes, bytes_left(group, files));
  return bytes;
}

double processor_quota(const std::string& root) {
  double cores = std::numeric_limits<double>::infinity();
  for (const std::string& group : control_groups(root, "/sys/fs/cgroup", ""))
    cores = std::min(cores, quota_in(group + "/cpu.max"));
  for (const std::string& group : control_groups(root, "/sys/fs/cgroup/cpu", "cpu"))
    cores = std::min(cores, cores_of(number_in(group + "/cpu.cfs_quota_us", 0),
                                     number_in(group + "/cpu.cfs_period_us", 0)));
  return cores;
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
