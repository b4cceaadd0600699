// The routed experts of a GPU among ranks that have the same rows, and of which several have the
// same expert: those that another rank's replica computes are left out.
#pragma once
#include "offload/gpu/exchange/cuda_owners.h"
#include "ops/expert_pool.h"

namespace tandem {

class CudaReplicas final : public ExpertPool {
 public:
  // For batches of up to max_tokens rows with n_active experts each. `mine` skips ids of -1.
  // References outlive the object.
  CudaReplicas(const CudaOwners& owners, ExpertPool& mine, int max_tokens, int n_active);
  // Bytes on the GPU.
  static int64_t bytes_for(int max_tokens, int n_active);

  bool waits(Ticket ticket) override { return mine_.waits(ticket); }
  void add_to(Ticket ticket, TensorView y) override { mine_.add_to(ticket, y); }
  void begin_step(std::span<const Batch> replicas, int n_micro_batches) override {
    mine_.begin_step(replicas, n_micro_batches);
  }
  int micro_batches(std::span<const Batch> replicas, bool is_decode) const override {
    return mine_.micro_batches(replicas, is_decode);
  }
  void follow(LayerRange layers, const MicroBatches& step) override { mine_.follow(layers, step); }
  void end_step(LayerRange layers, const MicroBatches& step) override {
    ExpertPool::end_step(layers, step);
    mine_.end_step(layers, step);
  }

 private:
  Ticket start(const ExpertBatch& batch) override;

  const CudaOwners& owners_;
  ExpertPool& mine_;
  const gpu::Buffer ids_;  // [max_tokens, n_active]
};

}  // namespace tandem
