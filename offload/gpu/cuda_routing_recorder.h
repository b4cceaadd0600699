// RoutingRecorder for a backbone on a GPU: each layer's ids are copied from the GPU to pinned
// memory, in recorded steps too, and counted at the end of the step.
#pragma once
#include "gpu_kernels/runtime.h"
#include "offload/routing_recorder.h"

namespace tandem {

class CudaRoutingRecorder final : public ExpertObserver {
 public:
  // For steps of up to max_tokens tokens. Each step then waits for the GPU at its end. References
  // outlive the object, and the object outlives all recorded steps.
  CudaRoutingRecorder(const ModelConfig& config, int max_tokens, gpu::Stream& stream);

  void submitted(const ExpertBatch& batch) override;
  void step_ended(LayerRange layers, int n_tokens) override;

  const RoutingCounts& counts() const { return counter_.counts(); }

 private:
  TensorView ids_of(int layer, int64_t first_row, int64_t n_tokens) const;

  const ModelConfig& c_;
  gpu::Stream& stream_;
  const int max_tokens_;
  gpu::Buffer ids_;  // mapped, [layers, max_tokens, n_active]
  RoutingCounter counter_;
};

}  // namespace tandem
