// Placements with a backbone on the GPU and experts on GPU and CPU.
#pragma once
#include <fmt/format.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <random>

#include "model/cost.h"
#include "offload/plan/placement_json.h"
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

class PlacementFile {
 public:
  explicit PlacementFile(const Placement& placement)
      : path_(std::filesystem::temp_directory_path() /
              fmt::format("tandem-placement-{}.json", getpid())) {
    std::ofstream(path_) << placement_to_json(placement).dump();
  }
  ~PlacementFile() { std::filesystem::remove(path_); }
  std::string path() const { return path_.string(); }

 private:
  const std::filesystem::path path_;
};

constexpr DeviceId kCpu{0, -1}, kGpu{0, 0};

inline Placement backbone_on_gpu(const ModelConfig& c, int64_t kv_tokens) {
  Placement p;
  p.backbone = stored_format(c);
  p.stages = {{0, c.n_layers - 1, {kGpu}, 1}};
  p.kv_tokens = kv_tokens;
  return p;
}

// A random placement of experts, in which some layers have all or no experts on the GPU.
inline Placement random_placement(const ModelConfig& c, std::mt19937& rng,
                                  bool may_stream = false) {
  Placement p = backbone_on_gpu(c, kContext);
  p.embedding_on_cpu = rng() % 2;
  p.prefill_chunk_tokens = 1 + static_cast<int>(rng() % 30);
  if (may_stream && rng() % 2) p.stream_from_tokens = 1 + static_cast<int>(rng() % 20);
  for (int l = 0; l < c.n_layers; ++l) {
    if (!c.is_moe(l)) continue;
    ExpertGroup cpu = {{}, stored_expert_format(c), {kCpu}}, gpu = cpu;
    gpu.owners = {kGpu};
    const unsigned in_eight = rng() % 9;  // share of experts on the GPU, in eighths
    for (int e = 0; e < c.router.n_experts; ++e)
      (rng() % 8 < in_eight ? gpu : cpu).experts.push_back(e);
    LayerExperts layer = {l, l, {}};
    for (const ExpertGroup& group : {cpu, gpu})
      if (!group.experts.empty()) layer.groups.push_back(group);
    p.layers.push_back(layer);
  }
  return p;
}

}  // namespace tandem::test
