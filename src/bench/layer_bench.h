// `tandem bench moe` and `tandem bench layer`: the feed-forward part of a MoE layer, and whole
// layers as the forward pass runs them.
#pragma once
#include "bench/experts_bench.h"
#include "bench/roofline.h"

namespace tandem {

struct LayerBench {
  std::string config_name;
  ModelConfig config;
  int n_layers;  // in rotation
  WeightFormats formats;
  std::vector<int> contexts;  // for `layer`
  std::vector<int> tokens;
  double seconds;
  int64_t memory_bytes;
  GpuBenchModels gpus = {};  // empty: no GPU
};

// The minimum work of one layer; the parts run one after another.
struct LayerCost {
  Cost matrices, experts, attention;  // attention: over the cache only
};
// For the last `n` of `context` tokens; experts: the number that uniform routing is expected to
// choose.
LayerCost cost_of_layer(const ModelConfig& config, WeightFormats formats, bool moe, int64_t context,
                        int64_t n, int64_t cache_element_bytes);

// Measures router, shared experts and routed experts.
void bench_moe(const LayerBench& bench, const cpu::KernelTable& kernels, MachineSpeed& speed,
               const OnRow& on_row);
// Measures whole dense and MoE layers, from residual stream to residual stream.
void bench_layer(const LayerBench& bench, const cpu::KernelTable& kernels, MachineSpeed& speed,
                 const OnRow& on_row);

}  // namespace tandem
