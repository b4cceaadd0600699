// Attention on a GPU, in both forms: chooses the kernels for given dimensions and allocates their
// scratch.
#pragma once
#include "ops/cuda_batch.h"
#include "ops/cuda_products.h"

namespace tandem {

class CudaAttention {
 public:
  // All references outlive the object, and require_takes() accepts the dimensions. Throws Error
  // when too little GPU memory is left.
  CudaAttention(const MlaConfig& mla, CudaLimits limits, const CudaBatch& batch,
                CudaProducts& products, gpu::Stream& stream);
  static int64_t bytes_for(const MlaConfig& mla, CudaLimits limits);
  // Throws Error for dimensions that no kernel supports.
  static void require_takes(const MlaConfig& mla);
  // Throws Error where attention with weights like kv_b cannot read a cache in FP8.
  static void require_fp8_cache(const MlaConfig& mla, const QuantView& kv_b);

  void absorbed(const MlaArgs& args);
  // Attends, and multiplies the output by `restore`.
  void absorbed(const MlaArgs& args, const LinearPerHead& restore);
  void naive(const MlaArgs& args, const QuantView& kv_b);

 private:
  gpu::MlaDecodeArgs decode_args(const MlaArgs& args) const;
  void absorbed_plainly(const MlaArgs& args, int first_token, int n_tokens, TensorView q,
                        TensorView q_rope, TensorView out);
  void naive_through_latents(const MlaArgs& args, const Sequence& s, const QuantView& kv_b);
  void restore_and_attend(const MlaArgs& args, const Sequence& s, const QuantView& kv_b);

  const CudaLimits limits_;
  const CudaBatch& batch_;
  CudaProducts& products_;
  gpu::Stream& stream_;
  const int64_t partial_rows_;  // rows of partial_
  const int64_t restored_pairs_;
  gpu::Buffer partial_, partial_lse_;  // partial_ also carries sums of mla_prefill()
  gpu::Buffer latents_, restored_;
  gpu::Buffer plain_;  // [2 * kPlainTokens * heads, kv_rank] queries and outputs as latents
};

}  // namespace tandem
