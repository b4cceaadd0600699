// Selects the experts that move from a host's CPUs to its GPUs: the most used first, in one order
// over all layers.
#pragma once
#include <vector>

#include "offload/plan/predict.h"

namespace tandem {

// A GPU and its relative share of the experts that move.
struct HotSeat {
  DeviceId gpu;
  double part;
};

class HotExperts {
 public:
  // Ranks experts by their chance of use in a step of `tokens` tokens.
  HotExperts(const PlanInput& input, WeightFormat format, double tokens);
  // Number of experts in all layers.
  int64_t size() const { return size_; }
  // Places the first `n` experts on the seats, each layer's use in proportion to the seats' parts,
  // and the rest on the CPU.
  std::vector<LayerExperts> first(int64_t n, const std::vector<HotSeat>& seats) const;

 private:
  LayerExperts layer(int i, int64_t n, const std::vector<HotSeat>& seats) const;

  const PlanInput& in_;
  WeightFormat format_;
  std::vector<int> layers_;                  // MoE layers
  std::vector<std::vector<double>> chance_;  // [MoE layers][experts]; empty under even routing
  std::vector<std::vector<int>> order_;      // [MoE layers] experts, hottest first; one row if even
  std::vector<double> chances_;              // of all layers' experts, descending
  int64_t size_;
};

}  // namespace tandem
