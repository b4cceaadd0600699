// The routed experts of a GPU whose replica of the backbone has tokens of its own: rows go to the
// GPUs of all ranks, which compute their experts for all of them, and the sums are reduced and
// scattered. Everything is enqueued on the stream, with sizes that the host knows before the step.
#pragma once
#include "gpu_kernels/collectives.h"
#include "model/backbone_share.h"
#include "model/config.h"
#include "ops/expert_pool.h"

namespace tandem {

class CudaGatheredExperts final : public ExpertPool {
 public:
  struct Parts {
    gpu::Collectives& ranks;  // all ranks of the grid
    const BackboneGrid grid;
    ExpertPool& mine;  // has this rank's experts, for grid.most_tokens() tokens; skips ids of -1
    gpu::Stream& stream;
  };
  // For replicas with steps of up to max_tokens tokens. References outlive the object.
  CudaGatheredExperts(const ModelConfig& config, const Parts& parts, int max_tokens);
  // Bytes on the GPU.
  static int64_t bytes_for(const ModelConfig& config, BackboneGrid grid, int max_tokens);

  bool waits(Ticket ticket) override { return p_.mine.waits(ticket); }
  void add_to(Ticket ticket, TensorView y) override;
  void begin_step(std::span<const Batch> replicas, int n_micro_batches) override;
  void follow(LayerRange layers, const MicroBatches& step) override;
  void end_step(LayerRange layers, const MicroBatches& step) override;

 private:
  Ticket start(const ExpertBatch& batch) override;
  // The rows of all ranks, as one micro-batch.
  MicroBatches all_rows() const;
  int64_t n_rows() const { return n_of_rank_ * p_.ranks.n_ranks(); }
  TensorView sums() const { return {sums_.as<float>(), n_rows(), c_.dim, c_.dim}; }

  const ModelConfig& c_;
  const Parts p_;
  const int64_t stride_;         // floats of a packed row
  gpu::Buffer rows_;             // [all tokens, stride_]
  gpu::Buffer sums_;             // [all tokens, dim]
  int64_t n_of_rank_ = 0;        // rows of every rank in this step: the most that one has
  std::vector<int32_t> tokens_;  // [all tokens] zeros
  Sequence sequence_ = {};
};

}  // namespace tandem
