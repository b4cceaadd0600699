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
  Routing routing;    // ids and weights a token; experts below 0 are left out
  int first_row = 0;  // which of the step's rows is the first of these
  const float* x_scales = nullptr;
};

class RoutedExperts {
 public:
  virtual ~RoutedExperts() = default;
  virtual void submit(const ExpertBatch& batch) = 0;  // starts the work
  // y += sum of weight * expert(x) of the last submit, [tokens, dim]; what another device than the
  // backbone's computes may be left to add_rest_to().
  virtual void add_to(TensorView y) = 0;
  // The rest, of `layer` for the step's rows from first_row on. Until then the other half of the
  // step may be submitted and added to, not more.
  virtual void add_rest_to(int /*layer*/, int /*first_row*/, TensorView /*y*/) {}
  // Whether a step in which so many sequences decode had better go through the layers in two
  // halves.
  virtual bool wants_halves(int /*n_sequences*/) const { return false; }
  // A device is repeating a recorded step, without calls of the above: does what the host has to do
  // in all its layers.
  virtual void follow(const StepParts& /*step*/) {}
};

}  // namespace tandem
