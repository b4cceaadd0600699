// The replicas of a model's backbone: each has a scheduler and pages of its own, and computes the
// sequences that are dealt to it. A model that is there once has one.
#pragma once
#include <unordered_map>
#include <vector>

#include "scheduling/scheduler.h"

namespace tandem {

class Replicas {
 public:
  // `limits`: of each.
  Replicas(int n, const Scheduler::Limits& limits);
  int n() const { return static_cast<int>(schedulers_.size()); }
  Scheduler& at(int replica) { return schedulers_[replica]; }
  const Scheduler& at(int replica) const { return schedulers_[replica]; }

  // As Scheduler::add(), on the replica that has the fewest tokens to compute before this sequence
  // has a token: those of its other sequences, and those of the prompt that are not in its prefix
  // cache. Of equal ones, the one with the fewest sequences.
  void add(SequenceId id, std::vector<int32_t> prompt, int n_scored);
  void remove(SequenceId id);
  // The replica on which add() would now add a sequence.
  int best_for(std::span<const int32_t> prompt) const;
  // A sequence will be added on this replica, once the keys of its prompt have come; until then it
  // counts as one that has a token to compute.
  void expect(SequenceId id, int replica);
  void dismiss(SequenceId id);  // it is not expected any more
  int expected_on(SequenceId id) const { return expected_.at(id); }
  int replica_of(SequenceId id) const { return replica_of_.at(id); }
  // The scheduler that has the sequence.
  Scheduler& of(SequenceId id) { return schedulers_[replica_of(id)]; }
  const Scheduler& of(SequenceId id) const { return schedulers_[replica_of(id)]; }

  bool empty() const { return replica_of_.empty(); }
  void set_rates(const SwapRates& rates);
  void assume_cached(std::span<const int32_t> tokens);
  void forget_pages();
  Scheduler::Counts counts() const;  // of all replicas together

 private:
  std::vector<Scheduler> schedulers_;
  std::unordered_map<SequenceId, int> replica_of_, expected_;
  std::vector<int> n_expected_;  // [replicas]
};

}  // namespace tandem
