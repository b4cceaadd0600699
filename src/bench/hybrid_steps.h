// Steps of a model whose backbone a card has and whose routed experts the CPU has, timed beside
// what each of them takes without the other.
#pragma once
#include <functional>
#include <optional>

#include "bench/model_on_card.h"
#include "offload/cpu_experts.h"

namespace tandem {

class CpuPart;

class HybridSteps {
 public:
  // All references outlive the object; so does `card`, on which no routed expert is.
  struct Parts {
    const ModelConfig& config;
    CpuExperts& experts;
    const ModelOnCard& card;
    StepLimits limits;
    std::function<void()> before_cpu = {};  // in every layer: a slower CPU, for tests
  };
  explicit HybridSteps(const Parts& parts);
  ~HybridSteps();

  // Medians of steps that decode a token of each sequence, without embedding's and head's host
  // work: logits are not computed.
  struct Decode {
    double step;        // in one part
    double halves;      // in two micro-batches; of one sequence the same as `step`
    double no_cpu;      // the CPU hands a sum up at once
    double gpu;         // without routed experts and hand-off
    double cpu;         // the same experts of the same tokens, without the card
    int gpu_nodes = 0;  // kernels of the graph that `gpu` is; 0: it is none
  };
  // For about `seconds`, the five in turn.
  Decode decode(int context, int n_sequences, double seconds);

  // Medians of steps with the first n tokens of a prompt.
  struct Prefill {
    double streamed, on_cpu;       // experts brought to the card, and all computed by the CPU
    int64_t bytes;                 // brought in one
    double copy_bytes_per_second;  // of pinned memory to the card, beside it
    int crossover;                 // tokens from which on streaming is faster; 0: never
  };
  // Nothing where the card does not take experts in this format.
  std::optional<Prefill> prefill(int n, double seconds);

 private:
  void forward(StepRunner& model, const Batch& batch);

  const ModelConfig& config_;
  const ModelOnCard& card_;
  Device& device_;
  const StepLimits limits_;
  const std::unique_ptr<CpuPart> cpu_;
  const std::unique_ptr<HybridTwin> shared_;
  StepRunner model_;  // that shares; the card's own has no routed experts
  std::optional<int> crossover_;
};

}  // namespace tandem
