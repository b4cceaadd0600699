// Which experts a GPU and the CPU beside it are to exchange, from how often each was chosen: the
// GPU keeps its number of experts of each layer, and gets the most used ones.
#pragma once
#include <span>
#include <vector>

#include "offload/balance/rebalance.h"

namespace tandem {

// A layer with experts on both devices.
struct SharedLayer {
  int layer;
  std::vector<bool> on_gpu;  // [n_experts]
  std::vector<double> use;   // [n_experts] how often each was chosen
};

// Shares of all uses that are at experts on the GPU: as it is, and with the most used ones there.
struct GpuShareOfUses {
  double now = 0, best = 0;
};
GpuShareOfUses gpu_share_of_uses(std::span<const SharedLayer> layers);

// The owners of a change: these numbers instead of a rank's.
constexpr int32_t kHostOwner = 0, kGpuOwner = 1;

// Exchanges the most used expert of the CPU for the least used one of the GPU, and so on in all
// layers, while the former was chosen at least kHotter times as often. Those that bring most come
// first. A wave has at most `at_once` experts for each device. before, after: shares of the GPU.
constexpr double kHotter = 1.1;
constexpr int kHotExpertsAtOnce = 8;  // R1: 0.35 GB of spare memory on either device
RebalancePlan plan_hot_experts(std::span<const SharedLayer> layers, int at_once);

}  // namespace tandem
