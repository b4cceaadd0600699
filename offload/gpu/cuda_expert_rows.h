// A step's token rows on the GPU, sorted by expert, and the grouped products that compute them.
// Used for experts stored on the GPU and for streamed ones.
#pragma once
#include "gpu_kernels/products/products.h"
#include "gpu_kernels/runtime.h"
#include "model/config.h"
#include "ops/expert_pool.h"

namespace tandem {

class CudaExpertRows {
 public:
  // The stream outlives the object. Throws Error when the scratch does not fit GPU memory.
  // `fp8_activations` as in CudaLimits.
  CudaExpertRows(const ModelConfig& config, int max_tokens, gpu::Stream& stream,
                 bool fp8_activations = false);
  static int64_t bytes_for(const ModelConfig& config, int max_tokens);

  // Sorted rows. The micro-batches of a step use different parts of the scratch.
  struct Sorted {
    int64_t first_row, first_pair;
    Ticket ticket;
    TensorView weights;              // weights of the pairs
    gpu::Fp8Rows x_fp8, hidden_fp8;  // empty: BF16
  };
  // Each token has a row of x and ids below n_experts; negative ids are skipped. `like` is a matrix
  // with the format and scale blocks of all matrices that the rows will be multiplied with.
  Sorted sort(const ExpertBatch& batch, int n_experts, const gpu::Weight& like);
  // Experts [first, first + n), adjacent in memory.
  struct Range {
    int first, n;
  };
  void gate_up(const Sorted& rows, const gpu::ExpertWeights& gate, const gpu::ExpertWeights& up,
               Range experts);
  void down(const Sorted& rows, const gpu::ExpertWeights& down, Range experts);
  // y += sum of weights * rows of all computed experts.
  void add_to(const Sorted& rows, TensorView y);

  // Scratch for other kernels, [pairs, expert_dim] for the tokens from first_row on.
  float* hidden(int first_row) const {
    return hidden_.as<float>() +
           int64_t{first_row} * c_.router.n_active * gpu::product_stride(c_.expert_dim);
  }

 private:
  gpu::ExpertRows rows_of(const Sorted& rows, Range experts) const;
  void round(const Sorted& rows, TensorView x);
  bf16* x_of(const Sorted& rows) const;
  bf16* hidden_of(const Sorted& rows) const;
  int32_t* offsets_of(const Sorted& rows) const {
    return offsets_.as<int32_t>() + rows.ticket * (c_.router.n_experts + 1);
  }

  const ModelConfig& c_;
  gpu::Stream& stream_;
  const bool fp8_activations_;
  gpu::Buffer offsets_;  // [tickets, n_experts + 1]
  // [max_tokens, n_active] Pair i of token t is row row_of_[t, i].
  gpu::Buffer row_of_, tokens_of_rows_;
  gpu::Buffer x_;  // BF16 or FP8 [max_tokens, dim]
  // [pairs, expert_dim] BF16 and, after it, the same in FP8; or float for kernels without tensor
  // cores.
  gpu::Buffer hidden_;
  gpu::Buffer rows_;  // [pairs, dim]
};

}  // namespace tandem
