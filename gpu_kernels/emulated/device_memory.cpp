#include "gpu_kernels/emulated/device_memory.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>

#include "core/check.h"
#include "core/memory.h"
#include "gpu_kernels/emulated/emulator.h"

namespace tandem::gpu::emulated {
namespace {

constexpr int64_t kPage = 4096;

// Slack from rounding up to pages precedes the data, so that the data ends at the guard page (as
// far as cudaMalloc's 256-byte alignment permits).
int64_t usable_bytes(int64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }
int64_t first_byte(int64_t bytes) { return (usable_bytes(bytes) - bytes) / 256 * 256; }

struct Region {
  size_t bytes;
  Site site;
};

// All emulated memory of the process, and the number of streams that work on it.
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
  // Describes the memory at a faulting address.
  const char* name_of(const void* address) {
    const std::lock_guard lock(mutex);
    const auto after = regions.upper_bound(address);
    if (after == regions.begin()) return "no device memory";
    const auto& [base, region] = *std::prev(after);
    const auto* const end = static_cast<const std::byte*>(base) + region.bytes;
    if (address < end) return "device memory while no stream works";
    return address < end + kPage ? "memory behind a buffer" : "no device memory";
  }
  static DeviceMemory& of_process() {
    static DeviceMemory memory;
    return memory;
  }
};

// Reports the faulting thread and address; the default action then ends the program.
void report_bad_address(int, siginfo_t* info, void* context) {
  const auto at = static_cast<const ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP];
  Dl_info program = {};
  dladdr(reinterpret_cast<void*>(at), &program);
  char who[300], line[800];
  name_running_thread(who, sizeof who);
  const int n =
      std::snprintf(line, sizeof line, "%s touches %s, at %p: addr2line -fe %s %#llx\n", who,
                    DeviceMemory::of_process().name_of(info->si_addr), info->si_addr,
                    program.dli_fname ? program.dli_fname : "?",
                    static_cast<long long>(at) - reinterpret_cast<long long>(program.dli_fbase));
  if (n > 0) (void)!write(STDERR_FILENO, line, std::min(static_cast<size_t>(n), sizeof line - 1));
}

// Installs the handler unless another one is installed, as by sanitizers.
bool listen_to_bad_addresses() {
  struct sigaction action = {}, before = {};
  sigaction(SIGSEGV, nullptr, &before);
  if (before.sa_handler != SIG_DFL) return false;
  action.sa_sigaction = report_bad_address;
  action.sa_flags = static_cast<int>(SA_SIGINFO | SA_RESETHAND);
  sigaction(SIGSEGV, &action, nullptr);
  return true;
}

}  // namespace

void* allocate(int64_t bytes, Site site) {
  [[maybe_unused]] static const bool listens = listen_to_bad_addresses();
  const auto usable = static_cast<size_t>(usable_bytes(bytes));
  // Protecting huge pages is 500 times as fast.
  void* const base = map_in_huge_pages(static_cast<int64_t>(usable) + kPage);
  require(base, "the emulated GPU has no {:.2f} GB left", static_cast<double>(bytes) * 1e-9);
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
