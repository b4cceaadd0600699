// Products on a GPU: which kernel takes which weights and how many tokens, and the scratch that
// they need.
#pragma once
#include "gpu_kernels/products.h"
#include "model/config.h"
#include "ops/ops.h"

namespace tandem {

class CudaProducts {
 public:
  // For the dense matrices of a model and steps of up to max_tokens tokens.
  CudaProducts(const ModelConfig& config, int max_tokens, int n_multiprocessors,
               gpu::Stream& stream);
  static int64_t bytes_for(const ModelConfig& config, int max_tokens, int n_multiprocessors);

  // out = x w^T. Of x, BF16 is used, unless w is float or has scale blocks that tensor cores do not
  // take.
  void multiply(TensorView x, const QuantView& w, TensorView out);
  // The same with nothing rounded.
  void multiply_exactly(TensorView x, const QuantView& w, TensorView out);
  void multiply_per_head(const LinearPerHead& args);

 private:
  gpu::Workspace workspace() const { return {partial_.as<float>(), counters_.as<uint32_t>()}; }

  gpu::Stream& stream_;
  const int n_multiprocessors_;
  gpu::Buffer rounded_;  // BF16 [max_tokens, columns]
  gpu::Buffer partial_, counters_;
};

constexpr int kTileBlockCols = 64;  // of most kernels for tensor cores
// Whether kernels for tensor cores take w, whose scale blocks they want in so many columns.
bool for_tensor_cores(const gpu::Weight& w, int block_cols);

}  // namespace tandem
