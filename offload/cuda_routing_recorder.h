// RoutingRecorder of a backbone on a GPU, whose ids are there: each layer's are copied to pinned
// memory, in recorded steps too, and counted when the step has ended.
#pragma once
#include <vector>

#include "gpu_kernels/runtime.h"
#include "offload/routing_recorder.h"

namespace tandem {

class CudaRoutingRecorder final : public RoutedExperts {
 public:
  // For steps of up to max_tokens tokens, which end in waiting for the card. References outlive the
  // object, and it all recordings.
  CudaRoutingRecorder(const ModelConfig& config, RoutedExperts& experts, int max_tokens,
                      gpu::Stream& stream);

  void submit(const ExpertBatch& batch) override;
  void add_to(TensorView y) override;
  void add_rest_to(int layer, int first_row, TensorView y) override;
  bool wants_halves(int n_sequences) const override { return experts_.wants_halves(n_sequences); }
  void follow(const StepParts& step) override;

  const RoutingCounts& counts() const { return counts_; }

 private:
  TensorView ids_of(int layer, int64_t first_row, int64_t n_tokens) const;
  void count(int64_t first_row, int64_t n_tokens);

  const ModelConfig& c_;
  RoutedExperts& experts_;
  gpu::Stream& stream_;
  const int max_tokens_;
  gpu::Buffer ids_;  // mapped, [layers, max_tokens, n_active]
  RoutingCounts counts_;
};

}  // namespace tandem
