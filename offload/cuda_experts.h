// Routed experts in the memory of a GPU, all of them or some of each layer, computed on the stream
// of the backbone: two micro-batches may be under way.
#pragma once
#include <array>
#include <vector>

#include "model/weights.h"
#include "offload/cuda_expert_rows.h"

namespace tandem {

class CudaExperts final : public ExpertPool {
 public:
  // `weights` lie on the GPU as CudaWeights keeps them, uncut, those that are there one after the
  // other; all references outlive the object. A micro-batch's rows are in use from submit() to
  // add_to(). submit() takes as ids places(); negative ones are left out.
  CudaExperts(const ModelConfig& config, const ModelWeights& weights, CudaExpertRows& rows,
              gpu::Stream& stream);

  // [n_experts] place of each among those of its layer on the GPU; -1: it is not there.
  static std::vector<int32_t> places(const std::vector<FfnWeights>& experts);

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
  std::vector<Layer> layers_;  // empty where a layer has no experts here
  std::array<Started, kMaxTickets> started_;
};

}  // namespace tandem
