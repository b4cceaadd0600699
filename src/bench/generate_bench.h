// `tandem bench generate`: a cut model with random weights, run end to end by the engine itself.
#pragma once
#include "bench/bench_model.h"
#include "bench/gpu_twin.h"
#include "bench/machine_speed.h"
#include "bench/roofline.h"
#include "core/machine.h"

namespace tandem {

struct GenerateBench {
  std::string config_name;
  ModelConfig config;
  int n_layers;  // the first is dense, the others have experts
  WeightFormats formats;
  std::vector<int> contexts;  // at which is decoded
  std::vector<int> batches;   // sequences that are decoded at a time
  std::vector<int> prompts;   // lengths
  int new_tokens;
  int step_tokens;  // of a prompt that one step computes
  double seconds;
  int64_t memory_bytes;
  GpuTwins gpus = {};  // empty: no GPU
  // Of this machine, for what is predicted; empty: those of its instruction set.
  std::vector<EfficiencyCurve> curves = {};
};

// The model that will be run. Throws Error when layers, contexts or memory do not allow one.
ModelConfig cut_model(const GenerateBench& bench);

// What a step of one token of each of `batch` sequences, all at the end of `context`, must read and
// compute, part by part; parts follow one another, so the roofline of a step is the sum of theirs.
// Experts: as many as uniform routing is expected to choose.
struct StepCost {
  Cost backbone, experts, attention;  // attention: over the cache alone
  int64_t bytes() const { return backbone.bytes + experts.bytes + attention.bytes; }
};
StepCost cost_of_step(const ModelConfig& config, WeightFormats formats, int64_t context,
                      int64_t batch, int64_t cache_element_bytes);

// Fields as in docs/benchmarks.md.
nlohmann::ordered_json bench_generate(const GenerateBench& bench, const cpu::KernelTable& kernels,
                                      MachineSpeed& speed);
std::string generate_text(const nlohmann::ordered_json& report);

}  // namespace tandem
