// Which experts leave a host's CPUs for its GPUs: the most used first, in one order of all layers.
#pragma once
#include <vector>

#include "offload/plan/predict.h"

namespace tandem {

// A GPU and its part of the experts that leave.
struct HotSeat {
  DeviceId gpu;
  double part;
};

class HotExperts {
 public:
  // Used by `tokens` a step.
  HotExperts(const PlanInput& input, WeightFormat format, double tokens);
  // Of all layers.
  int64_t size() const { return size_; }
  // The first `n` of them on the seats, so that every seat's use is its part; the rest on the CPU.
  std::vector<LayerExperts> first(int64_t n, const std::vector<HotSeat>& seats) const;

 private:
  LayerExperts layer(int i, int64_t n, const std::vector<HotSeat>& seats) const;

  const PlanInput& in_;
  WeightFormat format_;
  std::vector<int> layers_;                  // with experts
  std::vector<std::vector<double>> chance_;  // of each layer's experts, with statistics
  std::vector<std::vector<int>> order_;  // of each, hottest first; without statistics one for all
  std::vector<double> chances_;          // of all layers' experts, falling
  int64_t size_;
};

}  // namespace tandem
