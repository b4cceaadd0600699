// Products on a GPU: chooses the kernel by weights and number of tokens, and owns the scratch.
#pragma once
#include "gpu_kernels/products/products.h"
#include "gpu_kernels/runtime.h"
#include "model/config.h"
#include "ops/ops.h"

namespace tandem {

struct CudaLimits {
  int max_tokens;                // tokens of a step
  int64_t context;               // tokens of a sequence
  int n_multiprocessors;         // multiprocessors of the GPU
  double bytes_per_second = 0;   // GpuInfo::bytes_per_second
  bool fp8_activations = false;  // use FP8 where rounds_to_fp8(); requires GpuInfo::fp8_mma
};

class CudaProducts {
 public:
  // For the dense matrices of a model. Throws Error when too little GPU memory is left.
  CudaProducts(const ModelConfig& config, CudaLimits limits, gpu::Stream& stream);
  static int64_t bytes_for(const ModelConfig& config, CudaLimits limits);
  // Throws Error for scale blocks and numbers of experts that no kernel takes.
  static void require_takes(const ModelConfig& config);

  // out = x w^T. Rounds x to BF16, or to FP8 where rounds_to_fp8(), unless w is float or has scale
  // blocks that tensor cores do not support.
  void multiply(TensorView x, const QuantView& w, TensorView out);
  // With parts, x is joined from them, where joins_parts().
  void multiply_per_head(const LinearPerHead& args, const gpu::AttentionParts& parts = {});
  static bool joins_parts(const LinearPerHead& args);
  // Products of up to kSkinnyTokens tokens with one kernel; false: nothing was done, because there
  // are more tokens or the matrices need kernels of their own. See Ops.
  bool multiply_normalised(TensorView x, const QuantView& gain, float eps, const QuantView& w,
                           TensorView out);
  bool multiply_pair(TensorView x, const QuantView& w_0, TensorView out_0, const QuantView& w_1,
                     TensorView out_1);
  bool multiply_gated(TensorView x, const QuantView& gate, const QuantView& up, TensorView out);

  // Scratch for one launch at a time, also for a router's.
  gpu::Workspace workspace() const { return {partial_.as<float>(), counters_.as<uint32_t>()}; }
  int n_multiprocessors() const { return limits_.n_multiprocessors; }

 private:
  void multiply_exactly(TensorView x, const QuantView& w, TensorView out);  // without rounding x
  gpu::Fp8Rows rounded_to_fp8(TensorView x);
  gpu::SkinnyArgs skinny(TensorView x, const gpu::Weight& w, TensorView out) const;

  gpu::Stream& stream_;
  const CudaLimits limits_;
  gpu::Buffer rounded_;  // BF16 [max_tokens, columns], also used for FP8 and its scales
  gpu::Buffer partial_, counters_;
};

constexpr int kTileBlockCols = 64;  // for most tensor core kernels
// Whether tensor core kernels support w, if they need scale blocks of a multiple of block_cols
// columns.
bool for_tensor_cores(const gpu::Weight& w, int block_cols);

// Whether a step of n_tokens multiplies these weights by activations in FP8, if `wanted`: not where
// reading the weights takes most of the time. For dense matrices and experts.
bool rounds_to_fp8(bool wanted, const gpu::Weight& w, int64_t n_tokens);
// Layout of FP8 rows and their scales in memory for the same rows in BF16.
gpu::Fp8Rows fp8_rows_in(void* memory, int64_t n_rows, int64_t cols);

}  // namespace tandem
