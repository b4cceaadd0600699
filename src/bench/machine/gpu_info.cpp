#include <dlfcn.h>
#include <fmt/format.h>

#include <memory>

#include "bench/machine/machine_report.h"

namespace tandem {

FoundGpus find_gpus(const char* library) {
  struct Close {
    void operator()(void* handle) const { dlclose(handle); }
  };
  const std::unique_ptr<void, Close> driver(dlopen(library, RTLD_NOW | RTLD_LOCAL));
  if (!driver) return {{}, "no CUDA driver"};
  // CUDA driver API: every function returns 0 for success; a device is an int.
  const auto function = [&]<class... Args>(const char* name, int (*&pointer)(Args...)) {
    pointer = reinterpret_cast<int (*)(Args...)>(dlsym(driver.get(), name));
    return pointer != nullptr;
  };
  int (*init)(unsigned);
  int (*count)(int*);
  int (*get)(int*, int);
  int (*name_of_device)(char*, int, int);
  int (*memory_of)(size_t*, int);
  if (!function("cuInit", init) || !function("cuDeviceGetCount", count) ||
      !function("cuDeviceGet", get) || !function("cuDeviceGetName", name_of_device) ||
      !function("cuDeviceTotalMem_v2", memory_of))
    return {{}, fmt::format("{} is no CUDA driver", library)};
  int n = 0;
  if (const int error = init(0); error != 0 || count(&n) != 0 || n == 0)
    return {{}, fmt::format("the CUDA driver finds no GPU (error {})", error)};
  FoundGpus found;
  for (int i = 0; i < n; ++i) {
    int device = 0;
    char name[256] = {};
    size_t bytes = 0;
    if (get(&device, i) != 0 || name_of_device(name, sizeof name - 1, device) != 0 ||
        memory_of(&bytes, device) != 0)
      return {{}, fmt::format("the CUDA driver tells nothing of GPU {}", i)};
    found.gpus.push_back({name, static_cast<int64_t>(bytes)});
  }
  return found;
}

}  // namespace tandem
