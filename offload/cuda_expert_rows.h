// Rows of a step's tokens on the card, sorted by expert, on their way through grouped products: the
// same for experts that live there and for those that are brought there.
#pragma once
#include "gpu_kernels/products.h"
#include "model/config.h"
#include "ops/experts.h"

namespace tandem {

class CudaExpertRows {
 public:
  // The stream outlives the object. Throws Error when scratch does not fit the card.
  // `fp8_activations` as in CudaLimits.
  CudaExpertRows(const ModelConfig& config, int max_tokens, gpu::Stream& stream,
                 bool fp8_activations = false);
  static int64_t bytes_for(const ModelConfig& config, int max_tokens);

  // One of x and ids below n_experts for each row; negative ids are left out. `like`: a matrix of
  // the format and blocks of all that the rows will meet.
  void sort(const ExpertBatch& batch, int n_experts, const gpu::Weight& like);
  // Of experts [first, first + n), which lie one after the other.
  struct Range {
    int first, n;
  };
  void gate_up(const gpu::ExpertWeights& gate, const gpu::ExpertWeights& up, Range experts);
  void down(const gpu::ExpertWeights& down, Range experts);
  // y += sum of weights * rows of all experts that were computed.
  void add_to(TensorView y);

  float* hidden() const { return hidden_.as<float>(); }  // [pairs, expert_dim], scratch of others

 private:
  gpu::ExpertRows rows_of(Range experts) const;
  void round(TensorView x);

  const ModelConfig& c_;
  gpu::Stream& stream_;
  const bool fp8_activations_;
  // Pair i of token t is row row_of_[t, i].
  gpu::Buffer offsets_, row_of_, tokens_of_rows_;
  gpu::Buffer x_;  // BF16 or FP8 [max_tokens, dim]
  // BF16 [pairs, expert_dim], behind it the same in FP8; or float for other kernels than tensor
  // cores'.
  gpu::Buffer hidden_;
  gpu::Buffer rows_;                 // [pairs, dim]
  TensorView weights_;               // of the pairs that were sorted
  gpu::Fp8Rows x_fp8_, hidden_fp8_;  // of those, or nothing
};

}  // namespace tandem
