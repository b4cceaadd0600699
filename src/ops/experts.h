// The routed experts as the forward pass sees them: a layer's work goes out, a sum comes back.
// Where the experts live is nobody's business here; offload/ knows.
#pragma once
#include "model/batch.h"

namespace tandem {

// One MoE layer of one step.
struct ExpertBatch {
  int layer;
  TensorView x;     // [tokens, dim]
  Routing routing;  // ids and weights a token
};

class RoutedExperts {
 public:
  virtual ~RoutedExperts() = default;
  virtual void submit(const ExpertBatch& batch) = 0;  // starts the work
  virtual void add_to(
      TensorView y) = 0;  // y += sum of weight * expert(x) of the last submit, [tokens, dim]
};

}  // namespace tandem
