// Large dense products of float activations with BF16, F16 or F32 weights, by oneDNN.
#pragma once
#include "core/memory.h"
#include "core/team.h"
#include "core/tensor.h"
#include "cpu_kernels/kernels.h"

namespace tandem {

// From this many rows on oneDNN is faster than a kernel that streams the weights.
constexpr int64_t kDenseProductRows = 32;

// Keeps oneDNN to the instruction set of `isa`, so that a forced one is obeyed. Before the first
// product.
void limit_dense_products(cpu::Isa isa);

class DenseProduct {
 public:
  DenseProduct(const cpu::KernelTable& kernels, Team& team, int64_t max_cols);

  // out = x w^T, all float but w. Weights that are not float are widened a panel of rows at a time,
  // exactly.
  void run(TensorView x, TensorView w, TensorView out);

 private:
  const cpu::KernelTable& kernels_;
  Team& team_;
  Arena arena_;
  TensorView panel_of_thread_;  // [threads * kPanelRows, max_cols]
};

}  // namespace tandem
