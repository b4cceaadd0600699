// Artificial tokens with choices distributed evenly over a layer's experts, for measurements.
#pragma once
#include <span>

#include "gpu_kernels/runtime.h"
#include "model/config.h"
#include "ops/expert_pool.h"

namespace tandem {

class EvenBatch {
 public:
  EvenBatch(const ModelConfig& config, int max_tokens, std::span<const int> experts);
  // The first n tokens, in mapped memory.
  ExpertBatch of(int layer, int n) const;
  TensorView y(int n) const;  // [n, dim] for a sum

 private:
  const ModelConfig& c_;
  gpu::Buffer x_, y_, ids_, weights_;
};

}  // namespace tandem
