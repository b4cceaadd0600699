// `tandem bench experts`: a MoE layer's routed experts, as the engine runs them.
#pragma once
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/bench_model.h"
#include "bench/gpu_bench_model.h"
#include "bench/machine_speed.h"
#include "bench/random_routing.h"
#include "bench/roofline.h"

namespace tandem {

using OnRow = std::function<void(const nlohmann::ordered_json& row)>;

struct ExpertsBench {
  std::string config_name;
  ModelConfig config;
  WeightFormat format;
  std::vector<int> tokens;   // one row per count
  bool skew;                 // also measure routing where one expert takes half of the tokens
  double seconds;            // per row
  int64_t memory_bytes;      // for weights
  GpuBenchModels gpus = {};  // empty: no GPU
  MeasuringProgress progress = {};
};

// The minimum work of a step with this routing: read each used expert once, multiply the row of
// every (token, expert) pair.
struct ExpertsCost {
  int64_t bytes, ops;
  int n_experts;        // distinct experts
  int rows_of_busiest;  // tokens of the most used expert
};
// ids: [tokens, n_active].
ExpertsCost cost_of_experts(const ModelConfig& config, WeightFormat format, const TensorView& ids);

// Median seconds of a step, over the routings and layers in turn; x and y [tokens, dim] on the GPU.
double experts_on_gpu(GpuBenchModel& bench_model, std::span<const RandomRouting> steps,
                      int n_layers, TensorView x, TensorView y, double seconds);

void bench_experts(const ExpertsBench& bench, const cpu::KernelTable& kernels, MachineSpeed& speed,
                   const OnRow& on_row);

}  // namespace tandem
