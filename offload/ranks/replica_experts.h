// The pool of a rank that has a replica of the backbone for itself and links of its own to workers:
// no row travels between ranks.
#pragma once
#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/group.h"
#include "core/progress_watch.h"
#include "core/run_error.h"
#include "ops/expert_pool.h"

namespace tandem {

// Ranks meet at the end of a step only, where all learn whether it has failed on one of them. A
// step that fails on a rank goes on with zeros there, and end_step() throws on rank 0, which
// decides the steps, what the first of these ranks says. Without tokens a rank asks no worker.
class ReplicaExperts final : public ExpertPool {
 public:
  // The group has the ranks of all replicas, and is used for these meetings only. `mine` computes
  // the experts of this rank's tokens, by workers and by what this rank has. Both outlive the
  // object.
  ReplicaExperts(Group& group, ExpertPool& mine)
      : group_(group), mine_(mine), failed_(group.size()), told_(group.size()) {}

  bool waits(Ticket ticket) override { return mine_.waits(ticket); }
  void add_to(Ticket ticket, TensorView y) override;
  void begin_step(std::span<const Batch> replicas, int n_micro_batches) override;
  // As this rank's pool would have them if there were no other replica.
  int micro_batches(std::span<const Batch> replicas, bool is_decode) const override {
    return mine_.micro_batches(replicas.first(std::min<size_t>(replicas.size(), 1)), is_decode);
  }
  bool depends_on_replicas() const override { return false; }
  // What this rank has waited; nothing for a step in which it has no tokens.
  std::optional<double> seconds_waited() const override;
  // The links of this rank, as they are, and of the others, as hear() has heard last: in the order
  // of the ranks, each with its replica.
  std::vector<WorkerStatus> workers() const override;
  void follow(LayerRange layers, const MicroBatches& step) override;
  void end_step(LayerRange layers, const MicroBatches& step) override;

  // Thread-safe. The state of this rank's links in bytes that hear() of the other ranks takes.
  std::string told() const;
  // Thread-safe. [ranks] what all have told; this rank's own is left out.
  void hear(std::span<const std::string> of_ranks);

  // Thread-safe. There is work during a step; an event is a layer that begins or ends.
  WorkProgress progress() const { return {in_step_, n_events_}; }

 private:
  Ticket start(const ExpertBatch& batch) override;

  Group& group_;
  ExpertPool& mine_;
  bool has_tokens_ = false;  // in this step
  StepInCommon step_;
  std::vector<char> failed_;  // [ranks] whether the step has failed there
  std::atomic<bool> in_step_{false};
  std::atomic<uint64_t> n_events_{0};
  mutable std::mutex mutex_;                     // guards told_
  std::vector<std::vector<WorkerStatus>> told_;  // [ranks] links of the other ranks
};

}  // namespace tandem
