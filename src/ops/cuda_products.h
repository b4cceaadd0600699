// Products on a GPU: which kernel takes which weights and how many tokens, and the scratch that
// they need.
#pragma once
#include "gpu_kernels/products.h"
#include "model/config.h"
#include "ops/ops.h"

namespace tandem {

struct CudaLimits {
  int max_tokens;                // of a step
  int64_t context;               // tokens of a sequence
  int n_multiprocessors;         // of the card
  bool fp8_activations = false;  // where rounds_to_fp8(); the card has GpuInfo::fp8_mma
};

class CudaProducts {
 public:
  // For the dense matrices of a model.
  CudaProducts(const ModelConfig& config, CudaLimits limits, gpu::Stream& stream);
  static int64_t bytes_for(const ModelConfig& config, CudaLimits limits);

  // out = x w^T. Of x, BF16 is used, or FP8 where rounds_to_fp8(), unless w is float or has scale
  // blocks that tensor cores do not take.
  void multiply(TensorView x, const QuantView& w, TensorView out);
  // The same with nothing rounded.
  void multiply_exactly(TensorView x, const QuantView& w, TensorView out);
  void multiply_per_head(const LinearPerHead& args);

 private:
  gpu::Fp8Rows rounded_to_fp8(TensorView x);
  gpu::Workspace workspace() const { return {partial_.as<float>(), counters_.as<uint32_t>()}; }

  gpu::Stream& stream_;
  const CudaLimits limits_;
  gpu::Buffer rounded_;  // BF16 [max_tokens, columns], which has room for FP8 and its scales
  gpu::Buffer partial_, counters_;
};

constexpr int kTileBlockCols = 64;  // of most kernels for tensor cores
// Whether kernels for tensor cores take w, whose scale blocks they want in so many columns.
bool for_tensor_cores(const gpu::Weight& w, int block_cols);

// Whether a step of n_tokens multiplies these weights by activations in FP8, if its owner wants
// that: not where reading weights is what takes the time. Of dense matrices and of experts.
bool rounds_to_fp8(bool wanted, const gpu::Weight& w, int64_t n_tokens);
// Where FP8 rows and their scales lie in memory for as many rows of cols in BF16.
gpu::Fp8Rows fp8_rows_in(void* memory, int64_t n_rows, int64_t cols);

}  // namespace tandem
