// Steps of a model with its backbone on a GPU and its routed experts on the CPU, and the time that
// each takes without the other.
#pragma once
#include <functional>
#include <optional>

#include "bench/gpu_bench_model.h"
#include "offload/cpu_experts.h"

namespace tandem {

class CpuPart;

class HybridSteps {
 public:
  // All references must outlive the object, and so must `gpu_model`, which has no routed experts.
  struct Parts {
    const ModelConfig& config;
    CpuExperts& experts;
    const ModelOnGpu& gpu_model;
    StepLimits limits;
    // Called in every layer; simulates a slower CPU in tests.
    std::function<void()> before_cpu = {};
  };
  explicit HybridSteps(const Parts& parts);
  ~HybridSteps();

  // Median seconds of steps that decode a token per sequence. Logits are not computed, so the
  // host's work for embedding and head is not included.
  struct Decode {
    double step;        // as one batch
    double halves;      // as two micro-batches; equals `step` for one sequence
    double no_cpu;      // the CPU returns at once without computing
    double gpu;         // without routed experts and hand-offs
    double cpu;         // the same experts for the same tokens, without the GPU
    int gpu_nodes = 0;  // kernels in the graph of `gpu`; 0: not recorded
    int gpu_early = 0;  // those that may start before the kernel before has ended
  };
  // Measures for about `seconds`, the five kinds in turn.
  Decode decode(int context, int n_sequences, double seconds);

  // Medians of steps with the first n tokens of a prompt.
  struct Prefill {
    double streamed, on_cpu;       // experts streamed to the GPU; all computed by the CPU
    int64_t bytes;                 // streamed in one step
    double copy_bytes_per_second;  // pinned memory to the GPU, measured in between
    int crossover;                 // tokens from which streaming is faster; 0: never
  };
  // Empty if experts of this format cannot be streamed.
  std::optional<Prefill> prefill(int n, double seconds);

 private:
  void forward(StepRunner& model, const Batch& batch);

  const ModelConfig& config_;
  const ModelOnGpu& gpu_model_;
  Device& device_;
  const StepLimits limits_;
  const std::unique_ptr<CpuPart> cpu_;
  const std::unique_ptr<HybridBenchModel> shared_;
  StepRunner model_;  // with shared experts; the GPU's own model has none
  std::optional<int> crossover_;
};

}  // namespace tandem
