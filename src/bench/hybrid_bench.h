// `tandem bench hybrid`: steps shared by a GPU and the CPU, of a reduced model with random weights.
#pragma once
#include <nlohmann/json.hpp>

#include "bench/hybrid_steps.h"
#include "bench/machine_speed.h"
#include "core/machine.h"

namespace tandem {

// Seconds of a hand-off to the CPU and back: with the kernels of signals.h, as in the engine, and
// with the driver's stream memory operations (stream_flags.h); in a recorded graph, as in a decode
// step, and enqueued one by one.
struct HandOffs {
  struct Way {
    std::optional<double> recorded, enqueued;  // empty: refused
    std::string why_not = "";                  // the first refusal
  };
  Way kernels, memory_operations;
};

struct HybridBench {
  std::string config_name, gpu_name;
  ModelConfig config;
  int n_layers;  // the first is dense, the others have experts
  WeightFormats formats;
  std::vector<int> contexts;  // at which tokens are decoded
  std::vector<int> batches;   // decoding sequences
  std::vector<int> prompts;   // tokens per streamed step
  double seconds;             // per row
  int64_t memory_bytes;       // for experts
  GpuBenchModels gpus;
  // For the prediction: this machine's curves and the GPU's rates; empty: unknown.
  std::vector<EfficiencyCurve> curves = {};
  std::optional<Gpu> rates = {};
  std::function<void()> before_cpu = {};  // HybridSteps
  // Measured idle seconds between consecutive kernels of a recorded graph; empty: not measured.
  std::optional<double> kernel_gap = {};
};

// A report row of a measured decode step.
nlohmann::ordered_json decode_row(const HybridSteps::Decode& measured, const HybridBench& bench,
                                  const ModelConfig& config, int context, int n_sequences);

// Fields are listed in docs/benchmarks.md. Throws Error when host or GPU memory is insufficient.
nlohmann::ordered_json bench_hybrid(const HybridBench& bench, const cpu::KernelTable& kernels,
                                    MachineSpeed& speed);
std::string hybrid_text(const nlohmann::ordered_json& report);

// A separate row, since the cost of hand-offs is measured without a model.
nlohmann::ordered_json hand_off_row(const HandOffs& measured, const std::string& gpu_name);
std::string hand_off_text(const nlohmann::ordered_json& row);

}  // namespace tandem
