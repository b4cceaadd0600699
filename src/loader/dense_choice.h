// Which of a loaded model's dense products a provider computes (--dense-products).
#pragma once
#include "loader/model_options.h"
#include "model/weights.h"
#include "ops/cpu_ops.h"

namespace tandem {

// What is chosen for. References outlive the call.
struct DenseModel {
  const ModelConfig& config;
  ModelWeights& weights;  // packed
  const cpu::KernelTable& kernels;
  CpuOps& ops;
  Team& team;
  int max_tokens;  // per step
};

// Rearranges matrices for the provider, and lets the model's ops use it for them: with kOneDnn all
// that it takes, with kFastest those of the shapes for which it is faster, measured with a few
// numbers of rows. Returns one line that says what is chosen. Throws Error for kOneDnn if it takes
// none.
std::string choose_products(const DenseModel& model, ProductProvider& provider,
                            DenseProducts wanted);

// Numbers of rows of x that are measured, at most those of a step. The provider is faster if the
// product of its times is smaller.
constexpr int kMeasuredRows[] = {1, 4, 16, 64, 256};

}  // namespace tandem
