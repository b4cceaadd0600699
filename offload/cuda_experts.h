// Routed experts in the memory of a GPU, all of them or some of each layer, computed on the stream
// of the backbone.
#pragma once
#include <vector>

#include "model/weights.h"
#include "offload/cuda_expert_rows.h"

namespace tandem {

class CudaExperts final : public RoutedExperts {
 public:
  // `weights` lie on the card as CudaWeights keeps them, uncut, those that are there one after the
  // other; all references outlive the object. Rows are in use from submit() to add_to().
  CudaExperts(const ModelConfig& config, const ModelWeights& weights, CudaExpertRows& rows,
              gpu::Stream& stream);

  // Of each layer: [n_experts] where each stands among those on the card, -1: it is not there.
  static std::vector<int32_t> places(const std::vector<FfnWeights>& experts);

  // Ids are those places: what is below 0 is left out. They are valid until add_to().
  void submit(const ExpertBatch& batch) override;
  void add_to(TensorView y) override;

 private:
  struct Layer {
    gpu::ExpertWeights gate, up, down;
    int n_experts = 0;
  };
  void add_plainly(TensorView y);

  const ModelConfig& c_;
  gpu::Stream& stream_;
  CudaExpertRows& rows_;
  std::vector<Layer> layers_;  // empty where a layer has no experts here
  ExpertBatch batch_ = {};
};

}  // namespace tandem
