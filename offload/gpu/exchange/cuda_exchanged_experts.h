// The routed experts of a GPU whose replica of the backbone has tokens of its own: rows go to the
// GPUs of all ranks, or to those that have their experts, and sums come back (cuda_exchange.h).
// Everything is enqueued.
//
// Rows and sums travel on a stream of their own. Where this rank's experts are on its GPU, the
// backbone's stream meanwhile computes the shared expert, and in a step of several micro-batches
// what another one needs.
#pragma once
#include <array>

#include "offload/gpu/exchange/cuda_ways.h"

namespace tandem {

class CudaExchangedExperts final : public ExpertPool {
 public:
  struct Parts {
    gpu::Collectives& ranks;  // all ranks of the grid
    const BackboneGrid grid;
    ExpertPool& mine;  // has this rank's experts, for grid.most_tokens() tokens; skips ids of -1
    bool mine_on_gpu;  // all on the stream; otherwise the CPU computes some of them
    int micro_batches = 1;  // of every step, or kMeasured; 1 unless mine_on_gpu
  };
  // For steps of as many tokens as the ways were chosen for. References outlive the object.
  CudaExchangedExperts(const Parts& parts, CudaWays ways);

  const CudaWays& ways() const { return ways_; }
  // A number that changes while the GPU passes what it does with other ranks.
  uint64_t progress() const;

  bool waits(Ticket ticket) override;
  bool serve(Ticket ticket) override;
  void add_to(Ticket ticket, TensorView y) override;
  int micro_batches(std::span<const Batch>, bool) const override { return p_.micro_batches; }
  void begin_step(std::span<const Batch> replicas, int n_micro_batches) override;
  void follow(LayerRange layers, const MicroBatches& step) override;
  void end_step(LayerRange layers, const MicroBatches& step) override;

 private:
  Ticket start(const ExpertBatch& batch) override;
  void submit_arrived(Ticket ticket);
  void send_sums(Ticket ticket);
  // The rows of all ranks in the step's micro-batches.
  MicroBatches all_rows() const;
  bool is_divided() const { return n_micro_batches_ > 1; }

  const Parts p_;
  const CudaWays ways_;
  CudaExchange* way_;  // of this step
  std::array<CudaLane, kMaxTickets> lanes_;
  std::array<CudaExchange::Here, kMaxTickets> here_ = {};
  int n_micro_batches_ = 1;
  std::vector<int32_t> tokens_;  // zeros, of all ranks
  Sequence sequence_ = {};
};

}  // namespace tandem
