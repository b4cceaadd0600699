// The routed experts as the forward pass sees them: a layer's work goes out, a sum comes back.
// Where the experts live is nobody's business here; offload/ knows.
#pragma once
#include "model/batch.h"

namespace tandem {

// One MoE layer of one step.
struct ExpertBatch {
  int layer;
  // [tokens, dim]; for CPU experts also rows that are already encoded as their kernels want them
  // (CpuExperts::activation): kBF16, or kI8 for kU8, which has a scale a row.
  TensorView x;
  Routing routing;  // ids and weights a token; experts below 0 are left out
  const float* x_scales = nullptr;
};

class RoutedExperts {
 public:
  virtual ~RoutedExperts() = default;
  virtual void submit(const ExpertBatch& batch) = 0;  // starts the work
  virtual void add_to(
      TensorView y) = 0;  // y += sum of weight * expert(x) of the last submit, [tokens, dim]
  // A device is repeating a recorded step of so many tokens, without calls of the above: does what
  // the host has to do in all its layers.
  virtual void follow(int /*n_tokens*/) {}
};

}  // namespace tandem
