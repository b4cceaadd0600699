// `tandem bench embed`: rows of the embedding table by token.
#pragma once
#include "bench/experts_bench.h"

namespace tandem {

struct EmbedBench {
  std::string config_name;
  ModelConfig config;
  std::vector<int> tokens;  // one row per count
  double seconds;
  int64_t memory_bytes;
  GpuBenchModels gpus = {};  // empty: no GPU
};

void bench_embed(const EmbedBench& bench, const cpu::KernelTable& kernels, MachineSpeed& speed,
                 const OnRow& on_row);

}  // namespace tandem
