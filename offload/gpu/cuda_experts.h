// Routed experts in GPU memory, all of a layer's or some, computed on the backbone's stream; two
// micro-batches may be in progress.
#pragma once
#include <array>
#include <vector>

#include "model/weights.h"
#include "offload/gpu/cuda_expert_places.h"
#include "offload/gpu/cuda_expert_rows.h"

namespace tandem {

class CudaExperts final : public ExpertPool {
 public:
  // `weights` are in GPU memory as CudaWeights stores them, with the layer's experts
  // adjacent. All references outlive the object. A micro-batch's rows are in use from submit() to
  // add_to(). The ids of submit() are those of
  // ExpertPlaces; negative ones are skipped.
  CudaExperts(const ModelConfig& config, const ModelWeights& weights, CudaExpertRows& rows,
              gpu::Stream& stream);

  // [layers][n_experts] as ExpertPlaces takes them, of weights that the GPU has some experts of.
  // on_other_ranks: [layers][n_experts], or empty.
  static std::vector<std::vector<int32_t>> places(
      const ModelConfig& config, const ModelWeights& weights,
      const std::vector<std::vector<bool>>& on_other_ranks);

  // Whether kernels round the rows of all layers with experts to BF16.
  bool rounds_to_bf16() const;
  void add_to(Ticket ticket, TensorView y) override;

 private:
  struct Layer {
    gpu::ExpertWeights gate, up, down;
    int n_experts = 0;
  };
  struct Started {
    ExpertBatch batch = {};
    CudaExpertRows::Sorted rows = {};
  };
  static bool for_tensor_cores(const Layer& layer);
  Ticket start(const ExpertBatch& batch) override;
  void add_plainly(const ExpertBatch& batch, TensorView y);

  const ModelConfig& c_;
  gpu::Stream& stream_;
  CudaExpertRows& rows_;
  std::vector<Layer> layers_;  // empty for a layer without experts on the GPU
  std::array<Started, kMaxTickets> started_;
};

}  // namespace tandem
