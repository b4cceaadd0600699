// Routed experts in the memory of a GPU, all of them, computed on the stream of the backbone.
#pragma once
#include <vector>

#include "gpu_kernels/products.h"
#include "model/config.h"
#include "model/weights.h"
#include "ops/experts.h"

namespace tandem {

class CudaExperts final : public RoutedExperts {
 public:
  // `weights` lie on the card as CudaWeights keeps them, uncut; they and the stream outlive the
  // object. Throws Error when scratch does not fit the card.
  CudaExperts(const ModelConfig& config, const ModelWeights& weights, int max_tokens,
              gpu::Stream& stream);
  static int64_t bytes_for(const ModelConfig& config, int max_tokens);

  void submit(const ExpertBatch& batch) override;
  void add_to(TensorView y) override;

 private:
  struct Layer {
    gpu::ExpertWeights gate, up, down;
  };
  gpu::ExpertRows rows_of(int tokens) const;
  void add_plainly(TensorView y);

  const ModelConfig& c_;
  gpu::Stream& stream_;
  std::vector<Layer> layers_;  // empty where a layer has no experts
  // Pair i of token t is row row_of_[t, i]; rows are sorted by expert.
  gpu::Buffer offsets_, row_of_, tokens_of_rows_;
  gpu::Buffer x_;       // BF16 [max_tokens, dim]
  gpu::Buffer hidden_;  // BF16 [pairs, expert_dim], or float for other kernels than tensor cores'
  gpu::Buffer rows_;    // [pairs, dim]
  ExpertBatch batch_ = {};
};

}  // namespace tandem
