// The pool of a rank that has a replica of the backbone for itself and links of its own to workers,
// which have all routed experts: no row travels between ranks.
#pragma once
#include <optional>
#include <vector>

#include "comm/group.h"
#include "core/run_error.h"
#include "ops/expert_pool.h"

namespace tandem {

// Ranks meet at the end of a step only, where all learn whether it has failed on one of them. A
// step that fails on a rank goes on with zeros there, and end_step() throws on rank 0, which
// decides the steps, what the first of these ranks says. Without tokens a rank asks no worker.
class ReplicaExperts final : public ExpertPool {
 public:
  // The group has the ranks of all replicas; it and the pool outlive the object.
  ReplicaExperts(Group& group, ExpertPool& workers)
      : group_(group), workers_(workers), failed_(group.size()) {}

  bool waits(Ticket ticket) override { return workers_.waits(ticket); }
  void add_to(Ticket ticket, TensorView y) override;
  void begin_step(std::span<const Batch> replicas, int n_micro_batches) override;
  int micro_batches(std::span<const Batch> replicas, bool is_decode) const override {
    return workers_.micro_batches(replicas, is_decode);
  }
  // What this rank has waited; nothing for a step in which it has no tokens.
  std::optional<double> seconds_waited() const override;
  std::vector<WorkerStatus> workers() const override { return workers_.workers(); }
  void end_step(LayerRange layers, const MicroBatches& step) override;

 private:
  Ticket start(const ExpertBatch& batch) override;

  Group& group_;
  ExpertPool& workers_;
  bool has_tokens_ = false;  // in this step
  StepInCommon step_;
  std::vector<char> failed_;  // [ranks] whether the step has failed there
};

}  // namespace tandem
