// Placements with a backbone on the GPU and experts on GPU and CPU.
#pragma once
#include <filesystem>
#include <functional>
#include <random>
#include <string>

#include "offload/plan/placement.h"
#include "tests/setting.h"

namespace tandem::test {

constexpr int64_t kContext = 192;

// Limits the GPU's memory. The planner reserves 1 GB for the driver.
class LimitedGpuMemory {
 public:
  explicit LimitedGpuMemory(int64_t bytes) : memory_("TANDEM_GPU_MEMORY", std::to_string(bytes)) {}

 private:
  const Setting memory_;
};
constexpr int64_t kEnough = 8'000'000'000;

// GPU memory with room for the backbone and `share` of the experts, to `step` bytes. device_of:
// where a model runs with the memory that is set; empty, or an Error: it does not fit.
int64_t bytes_for_experts(const std::function<std::string()>& device_of, double share,
                          int64_t step);

class PlacementFile {
 public:
  explicit PlacementFile(const Placement& placement);
  ~PlacementFile();
  std::string path() const { return path_.string(); }

 private:
  const std::filesystem::path path_;
};

constexpr DeviceId kCpu{0, -1}, kGpu{0, 0};

Placement backbone_on_gpu(const ModelConfig& c, int64_t kv_tokens);

// A random placement of experts, in which some layers have all or no experts on the GPU.
Placement random_placement(const ModelConfig& c, std::mt19937& rng, bool may_stream = false);

}  // namespace tandem::test
