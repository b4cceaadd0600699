// `tandem bench generate`: a reduced model with random weights, run end to end by the engine.
#pragma once
#include "bench/bench_model.h"
#include "bench/gpu_bench_model.h"
#include "bench/machine_speed.h"
#include "bench/roofline.h"
#include "core/machine.h"

namespace tandem {

struct GenerateBench {
  std::string config_name;
  ModelConfig config;
  int n_layers;  // the first is dense, the others have experts
  WeightFormats formats;
  std::vector<int> contexts;  // at which tokens are decoded
  std::vector<int> batches;   // decoding sequences
  std::vector<int> prompts;   // prompt lengths
  int new_tokens;
  int step_tokens;  // prompt tokens per step
  double seconds;
  int64_t memory_bytes;
  GpuBenchModels gpus = {};  // empty: no GPU
  // This machine's curves for the prediction; empty: defaults of its instruction set.
  std::vector<EfficiencyCurve> curves = {};
};

// The model to run. Throws Error when layers, contexts or memory are insufficient.
ModelConfig cut_model(const GenerateBench& bench);

// The minimum work of a step of one token for each of `batch` sequences at the end of `context`.
// Parts run one after another, so the step's roofline is the sum of theirs. Experts: the number
// that uniform routing is expected to choose.
struct StepCost {
  Cost backbone, experts, attention;  // attention: over the cache only
  int64_t bytes() const { return backbone.bytes + experts.bytes + attention.bytes; }
};
StepCost cost_of_step(const ModelConfig& config, WeightFormats formats, int64_t context,
                      int64_t batch, int64_t cache_element_bytes);

// Fields are listed in docs/benchmarks.md.
nlohmann::ordered_json bench_generate(const GenerateBench& bench, const cpu::KernelTable& kernels,
                                      MachineSpeed& speed);
std::string generate_text(const nlohmann::ordered_json& report);

}  // namespace tandem
