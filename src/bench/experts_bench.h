// `tandem bench experts`: a MoE layer's routed experts, as the engine runs them.
#pragma once
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/bench_model.h"
#include "bench/gpu_twin.h"
#include "bench/machine_speed.h"
#include "bench/random_routing.h"
#include "bench/roofline.h"

namespace tandem {

using OnRow = std::function<void(const nlohmann::ordered_json& row)>;

struct ExpertsBench {
  std::string config_name;
  ModelConfig config;
  WeightFormat format;
  std::vector<int> tokens;  // a row each
  bool skew;                // one expert takes half of the tokens, beside uniform routing
  double seconds;           // a row
  int64_t memory_bytes;     // for weights
  GpuTwins gpus = {};       // empty: no GPU
  MeasuringProgress progress = {};
};

// What a step with this routing must do: read each expert once, multiply every pair's row.
struct ExpertsCost {
  int64_t bytes, ops;
  int n_experts;        // different ones
  int rows_of_busiest;  // tokens of the expert that most go to
};
// ids: [tokens, n_active].
ExpertsCost cost_of_experts(const ModelConfig& config, WeightFormat format, const TensorView& ids);

// A step of each routing in turn, on layers in turn; x and y [tokens, dim] on the card.
double experts_on_card(GpuTwin& twin, std::span<const RandomRouting> steps, int n_layers,
                       TensorView x, TensorView y, double seconds);

void bench_experts(const ExpertsBench& bench, const cpu::KernelTable& kernels, MachineSpeed& speed,
                   const OnRow& on_row);

}  // namespace tandem
