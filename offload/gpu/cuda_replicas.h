// The routed experts of a GPU among ranks of which several have the same expert: of the rows that
// come, those that another rank's replica computes are left out.
#pragma once
#include "gpu_kernels/runtime.h"
#include "offload/ranks/expert_owners.h"
#include "ops/expert_pool.h"

namespace tandem {

class CudaReplicas final : public ExpertPool {
 public:
  struct Parts {
    const ExpertOwners& owners;  // ReplicaChoice::kNearest
    int rank, n_ranks;           // of those that share the experts
    bool gathered;               // rows are those of all ranks, equally many of each
    ExpertPool& mine;            // skips ids of -1
    gpu::Stream& stream;
  };
  // For batches of up to max_tokens rows with n_active experts each. References outlive the object.
  CudaReplicas(const Parts& parts, int max_tokens, int n_active);
  // Bytes on the GPU.
  static int64_t bytes_for(int n_layers, int n_experts, int n_ranks, int max_tokens, int n_active);

  // Between steps: the owners have changed.
  void read_owners();

  bool waits(Ticket ticket) override { return p_.mine.waits(ticket); }
  void add_to(Ticket ticket, TensorView y) override { p_.mine.add_to(ticket, y); }
  void begin_step(std::span<const Batch> replicas, int n_micro_batches) override {
    p_.mine.begin_step(replicas, n_micro_batches);
  }
  int micro_batches(std::span<const Batch> replicas, bool is_decode) const override {
    return p_.mine.micro_batches(replicas, is_decode);
  }
  void follow(LayerRange layers, const MicroBatches& step) override {
    p_.mine.follow(layers, step);
  }
  void end_step(LayerRange layers, const MicroBatches& step) override {
    ExpertPool::end_step(layers, step);
    p_.mine.end_step(layers, step);
  }

 private:
  Ticket start(const ExpertBatch& batch) override;

  const Parts p_;
  const int n_active_;
  gpu::Buffer owners_;  // [layers, n_experts, n_ranks]
  gpu::Buffer ids_;     // [max_tokens, n_active]
};

}  // namespace tandem
