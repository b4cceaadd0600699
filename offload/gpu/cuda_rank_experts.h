// The routed experts of a rank that has all of its experts on its GPU. The forward pass adds the
// sums of all ranks (Ops::all_reduce).
#pragma once
#include "offload/gpu/cuda_experts.h"

namespace tandem {

class CudaRankExperts final : public ExpertPool {
 public:
  // `mine` and the stream outlive the object. on_other_ranks: [layers][n_experts].
  CudaRankExperts(const ModelConfig& config, const ModelWeights& weights,
                  const std::vector<std::vector<bool>>& on_other_ranks, int max_tokens,
                  CudaExperts& mine, gpu::Stream& stream)
      : places_(config, CudaExperts::places(config, weights, on_other_ranks), max_tokens, stream),
        mine_(mine) {}

  // Between steps: the places of a layer's experts from now on, as ExpertPlaces takes them.
  void moved(int layer, std::span<const int32_t> places) { places_.set(layer, places); }

  bool waits(Ticket ticket) override { return mine_.waits(ticket); }
  void add_to(Ticket ticket, TensorView y) override { mine_.add_to(ticket, y); }

 private:
  Ticket start(const ExpertBatch& batch) override {
    ExpertBatch own = batch;
    own.routing.ids = places_.placed(batch);
    return mine_.submit(own);
  }

  ExpertPlaces places_;
  CudaExperts& mine_;
};

}  // namespace tandem
