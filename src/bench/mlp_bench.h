// `tandem bench mlp`: the dense products of a layer, and its whole dense feed-forward network.
#pragma once
#include "bench/experts_bench.h"

namespace tandem {

struct MlpBench {
  std::string config_name;
  ModelConfig config;
  WeightFormat format;
  std::vector<int> tokens;
  double seconds;
  int64_t memory_bytes;
  GpuBenchModels gpus = {};  // empty: no GPU
};

void bench_mlp(const MlpBench& bench, const cpu::KernelTable& kernels, MachineSpeed& speed,
               const OnRow& on_row);

}  // namespace tandem
