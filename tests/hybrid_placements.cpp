#include "tests/hybrid_placements.h"

#include <fmt/format.h>
#include <unistd.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "model/cost.h"
#include "offload/plan/placement_json.h"
#include "tests/error_of.h"

namespace tandem::test {

int64_t bytes_for_experts(const std::function<std::string()>& device_of, double share,
                          int64_t step) {
  // The least bytes with which `is` says yes of the device.
  const auto least = [&](const auto& is) {
    int64_t enough = kEnough, less = 0;
    while (enough - less > step) {
      const int64_t middle = (enough + less) / 2;
      const LimitedGpuMemory memory(middle);
      std::string device;
      error_of([&] { device = device_of(); });
      (is(device) ? enough : less) = middle;
    }
    return enough;
  };
  const int64_t backbone = least([](const std::string& device) { return !device.empty(); });
  const int64_t all = least([](const std::string& device) {
    return !device.empty() && device.find(", experts also on the cpu") == std::string::npos;
  });
  return backbone + static_cast<int64_t>(share * static_cast<double>(all - backbone));
}

PlacementFile::PlacementFile(const Placement& placement)
    : path_(std::filesystem::temp_directory_path() /
            fmt::format("tandem-placement-{}.json", getpid())) {
  std::ofstream(path_) << placement_to_json(placement).dump();
}

PlacementFile::~PlacementFile() { std::filesystem::remove(path_); }

Placement backbone_on_gpu(const ModelConfig& c, int64_t kv_tokens) {
  Placement p;
  p.backbone = stored_format(c);
  p.stages = {{0, c.n_layers - 1, {kGpu}, 1}};
  p.kv_tokens = kv_tokens;
  return p;
}

Placement random_placement(const ModelConfig& c, std::mt19937& rng, bool may_stream) {
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
