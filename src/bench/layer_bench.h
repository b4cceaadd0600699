// `tandem bench moe` and `tandem bench layer`: the feed-forward part of a MoE layer, and whole
// layers as the forward pass runs them.
#pragma once
#include "bench/experts_bench.h"
#include "bench/roofline.h"

namespace tandem {

struct LayerBench {
  std::string config_name;
  ModelConfig config;
  int n_layers;  // that are walked through
  WeightFormats formats;
  std::vector<int> contexts;  // of `layer`
  std::vector<int> tokens;
  double seconds;
  int64_t memory_bytes;
  GpuTwins gpus = {};  // empty: no GPU
};

// What one layer must read and compute, part by part; they follow one another.
struct LayerCost {
  Cost matrices, experts, attention;  // attention: over the cache alone
};
// For the last `n` of `context` tokens; experts: as many as uniform routing is expected to choose.
LayerCost cost_of_layer(const ModelConfig& config, WeightFormats formats, bool moe, int64_t context,
                        int64_t n, int64_t cache_element_bytes);

// Router, shared experts and routed experts.
void bench_moe(const LayerBench& bench, const cpu::KernelTable& kernels, MachineSpeed& speed,
               const OnRow& on_row);
// Dense and MoE layers, from residual stream to residual stream.
void bench_layer(const LayerBench& bench, const cpu::KernelTable& kernels, MachineSpeed& speed,
                 const OnRow& on_row);

}  // namespace tandem
