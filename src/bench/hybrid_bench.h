// `tandem bench hybrid`: steps that a GPU and the CPU share, of a cut model with random weights.
#pragma once
#include <nlohmann/json.hpp>

#include "bench/hybrid_steps.h"
#include "bench/machine_speed.h"
#include "core/machine.h"

namespace tandem {

// Seconds of a hand-off to the CPU and back, by the kernels of signals.h, as the engine does, and
// by the driver's stream memory operations (stream_flags.h); in a recorded graph, as a decode step
// has it, and enqueued one by one.
struct HandOffs {
  struct Way {
    std::optional<double> recorded, enqueued;  // nothing: refused
    std::string why_not = "";                  // the first refusal
  };
  Way kernels, memory_operations;
};

struct HybridBench {
  std::string config_name, card;  // card: its name
  ModelConfig config;
  int n_layers;  // the first is dense, the others have experts
  WeightFormats formats;
  std::vector<int> contexts;  // at which is decoded
  std::vector<int> batches;   // sequences that are decoded at a time
  std::vector<int> prompts;   // tokens of a streamed step
  double seconds;             // a row
  int64_t memory_bytes;       // for experts
  GpuTwins gpus;
  // For what is predicted: of this machine, and the card's rates; nothing: unknown.
  std::vector<EfficiencyCurve> curves = {};
  std::optional<Gpu> rates = {};
  std::function<void()> before_cpu = {};  // HybridSteps
  // Measured seconds between a kernel of a recorded graph and the next; nothing: not.
  std::optional<double> kernel_gap = {};
};

// A row of what was measured of a decode step, as the report has it.
nlohmann::ordered_json decode_row(const HybridSteps::Decode& measured, const HybridBench& bench,
                                  const ModelConfig& config, int context, int n_sequences);

// Fields as in docs/benchmarks.md. Throws Error when host or card have too little memory.
nlohmann::ordered_json bench_hybrid(const HybridBench& bench, const cpu::KernelTable& kernels,
                                    MachineSpeed& speed);
std::string hybrid_text(const nlohmann::ordered_json& report);

// Its own row, as what hand-offs cost is measured without a model.
nlohmann::ordered_json hand_off_row(const HandOffs& measured, const std::string& card);
std::string hand_off_text(const nlohmann::ordered_json& row);

}  // namespace tandem
