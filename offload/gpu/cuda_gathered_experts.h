// The routed experts of a GPU whose replica of the backbone has tokens of its own: rows go to the
// GPUs of all ranks, which compute their experts for all of them, and the sums are reduced and
// scattered. Everything is enqueued, with sizes that the host knows before the step.
//
// Rows and sums travel on a stream of their own. Where this rank's experts are on its GPU, the
// backbone's stream meanwhile computes the shared expert, and in a step of several micro-batches
// what another one needs.
#pragma once
#include <array>

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
    bool mine_on_gpu;  // all on the stream; otherwise the CPU computes some of them
    int micro_batches = 1;  // of every step, or kMeasured; 1 unless mine_on_gpu
    gpu::Stream& stream;    // of the backbone
    gpu::Stream& network;   // of what ranks do together
  };
  // For replicas with steps of up to max_tokens tokens. References outlive the object.
  CudaGatheredExperts(const ModelConfig& config, const Parts& parts, int max_tokens);
  // Bytes on the GPU.
  static int64_t bytes_for(const ModelConfig& config, BackboneGrid grid, int max_tokens,
                           int micro_batches);

  bool waits(Ticket ticket) override;
  bool serve(Ticket ticket) override;
  void add_to(Ticket ticket, TensorView y) override;
  int micro_batches(std::span<const Batch>, bool) const override { return p_.micro_batches; }
  void begin_step(std::span<const Batch> replicas, int n_micro_batches) override;
  void follow(LayerRange layers, const MicroBatches& step) override;
  void end_step(LayerRange layers, const MicroBatches& step) override;

 private:
  // The rows of a micro-batch.
  struct Lane {
    int64_t first = 0;      // row among those of the step
    int64_t n_of_rank = 0;  // of every rank: the most that one has
    ExpertBatch batch = {};
    gpu::Event there;  // rows have come, or sums have
  };

  Ticket start(const ExpertBatch& batch) override;
  void send_sums(Lane& lane);
  // The rows of all ranks in the step's micro-batches.
  MicroBatches all_rows() const;
  TensorView sums(const Lane& lane) const;
  bool is_divided() const { return n_micro_batches_ > 1; }

  const ModelConfig& c_;
  const Parts p_;
  const int64_t stride_;  // floats of a packed row
  const int64_t max_rows_;
  gpu::Buffer rows_;  // [max_rows_, stride_]
  gpu::Buffer sums_;  // [max_rows_, dim]
  gpu::Event ready_;  // what is sent next
  std::array<Lane, kMaxTickets> lanes_;
  int n_micro_batches_ = 1;
  std::vector<int32_t> tokens_;  // [max_rows_] zeros
  Sequence sequence_ = {};
};

}  // namespace tandem
