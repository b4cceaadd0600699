#include "gpu_kernels/emulated/device_memory.h"

#include <sys/mman.h>

#include <cstddef>
#include <cstring>
#include <map>
#include <mutex>

#include "core/check.h"

namespace tandem::gpu::emulated {
namespace {

constexpr int64_t kPage = 4096;

// The slack of rounding up to pages lies before the data, so that the data ends at the page that
// faults (cudaMalloc's 256-byte alignment permitting).
int64_t usable_bytes(int64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }
int64_t first_byte(int64_t bytes) { return (usable_bytes(bytes) - bytes) / 256 * 256; }

struct Region {
  size_t bytes;
  Site site;
};

// All memory that the process has from here, and how many streams work on it.
struct DeviceMemory {
  std::mutex mutex;
  std::map<const void*, Region> regions;
  int n_working = 0;

  void protect(const void* base, const Region& region) const {
    if (region.site == Site::kDevice)
      mprotect(const_cast<void*>(base), region.bytes,
               n_working > 0 ? PROT_READ | PROT_WRITE : PROT_NONE);
  }
  void protect_all() {
    for (const auto& [base, region] : regions) protect(base, region);
  }
  static DeviceMemory& of_process() {
    static DeviceMemory memory;
    return memory;
  }
};

}  // namespace

void* allocate(int64_t bytes, Site site) {
  const auto usable = static_cast<size_t>(usable_bytes(bytes));
  void* base = mmap(nullptr, usable + kPage, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  require(base != MAP_FAILED, "the emulated GPU has no {:.2f} GB left",
          static_cast<double>(bytes) * 1e-9);
  std::memset(base, 0xff, usable);
  mprotect(static_cast<std::byte*>(base) + usable, kPage, PROT_NONE);
  DeviceMemory& memory = DeviceMemory::of_process();
  const std::lock_guard lock(memory.mutex);
  memory.protect(base, memory.regions[base] = {usable, site});
  return static_cast<std::byte*>(base) + first_byte(bytes);
}

void release(void* data, int64_t bytes) {
  void* base = static_cast<std::byte*>(data) - first_byte(bytes);
  DeviceMemory& memory = DeviceMemory::of_process();
  const std::lock_guard lock(memory.mutex);
  memory.regions.erase(base);
  munmap(base, static_cast<size_t>(usable_bytes(bytes) + kPage));
}

bool is_allocated(const void* data, int64_t bytes) {
  DeviceMemory& memory = DeviceMemory::of_process();
  const std::lock_guard lock(memory.mutex);
  const auto after = memory.regions.upper_bound(data);
  if (after == memory.regions.begin()) return false;
  const auto& [base, region] = *std::prev(after);
  const auto* const end = static_cast<const std::byte*>(base) + region.bytes;
  return static_cast<const std::byte*>(data) + bytes <= end;
}

void open_device_memory() {
  DeviceMemory& memory = DeviceMemory::of_process();
  const std::lock_guard lock(memory.mutex);
  if (++memory.n_working == 1) memory.protect_all();
}

void close_device_memory() {
  DeviceMemory& memory = DeviceMemory::of_process();
  const std::lock_guard lock(memory.mutex);
  if (--memory.n_working == 0) memory.protect_all();
}

}  // namespace tandem::gpu::emulated
