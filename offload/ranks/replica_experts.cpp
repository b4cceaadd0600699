#include "offload/ranks/replica_experts.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>
#include <utility>

namespace tandem {
namespace {

// A WorkerStatus between ranks of one program.
struct ToldStatus {
  std::array<char, 264> address;  // HOST:PORT; longer ones are cut
  bool is_up, has_joined, is_standby, is_loading;
  int64_t n_experts, n_on_gpu, n_requests, n_failures;
  double seconds;
};

ToldStatus told_from(const WorkerStatus& status) {
  ToldStatus told = {.address = {},
                     .is_up = status.is_up,
                     .has_joined = status.has_joined,
                     .is_standby = status.is_standby,
                     .is_loading = status.is_loading,
                     .n_experts = status.n_experts,
                     .n_on_gpu = status.n_on_gpu,
                     .n_requests = status.n_requests,
                     .n_failures = status.n_failures,
                     .seconds = status.seconds};
  status.address.copy(told.address.data(), told.address.size() - 1);
  return told;
}

WorkerStatus status_from(const ToldStatus& told, int replica) {
  return {.address = told.address.data(),
          .is_up = told.is_up,
          .has_joined = told.has_joined,
          .is_standby = told.is_standby,
          .n_experts = told.n_experts,
          .n_on_gpu = told.n_on_gpu,
          .is_loading = told.is_loading,
          .n_requests = told.n_requests,
          .n_failures = told.n_failures,
          .seconds = told.seconds,
          .replica = replica};
}

}  // namespace

Ticket ReplicaExperts::start(const ExpertBatch& batch) {
  ++n_events_;
  if (batch.x.rows == 0) return batch.micro_batch;
  has_tokens_ = true;
  step_.unless_failed([&] { mine_.submit(batch); });
  return batch.micro_batch;
}

void ReplicaExperts::add_to(Ticket ticket, TensorView y) {
  if (y.rows > 0) step_.unless_failed([&] { mine_.add_to(ticket, y); });
  ++n_events_;
}

void ReplicaExperts::begin_step(std::span<const Batch> replicas, int n_micro_batches) {
  has_tokens_ = false;
  in_step_ = true;
  mine_.begin_step(replicas, n_micro_batches);
}

std::optional<double> ReplicaExperts::seconds_waited() const {
  return has_tokens_ ? mine_.seconds_waited() : std::nullopt;
}

void ReplicaExperts::follow(LayerRange layers, const MicroBatches& step) {
  if (step.n_tokens() == 0) return;
  has_tokens_ = true;
  mine_.follow(layers, step);
}

// The pool of a GPU says here, and not earlier, that its part of the step has failed.
void ReplicaExperts::end_step(LayerRange layers, const MicroBatches& step) {
  ExpertPool::end_step(layers, step);
  std::array<char, 960> text = {};  // longer ones are cut
  char failed = 0;
  const auto noting_failure = [&](const auto& call) {
    try {
      call();
    } catch (const StepFailed& error) {
      if (std::exchange(failed, 1)) return;
      const std::string_view why = error.what();
      std::copy_n(why.begin(), std::min(why.size(), text.size() - 1), text.begin());
    }
  };
  noting_failure([&] { step_.end(); });
  noting_failure([&] { mine_.end_step(layers, step); });
  in_step_ = false;  // other ranks may compute for long
  group_.all_gather_values(failed, std::span(failed_));
  const auto first = std::find(failed_.begin(), failed_.end(), 1);
  if (first == failed_.end()) return;
  group_.broadcast(std::as_writable_bytes(std::span(text)),
                   static_cast<int>(first - failed_.begin()));
  if (group_.rank() == 0) throw StepFailed(text.data());
}

std::vector<WorkerStatus> ReplicaExperts::workers() const {
  std::vector<WorkerStatus> own = mine_.workers(), all;
  for (WorkerStatus& status : own) status.replica = group_.rank();
  const std::lock_guard lock(mutex_);
  for (int rank = 0; rank < group_.size(); ++rank) {
    const std::vector<WorkerStatus>& of_rank = rank == group_.rank() ? own : told_[rank];
    all.insert(all.end(), of_rank.begin(), of_rank.end());
  }
  return all;
}

std::string ReplicaExperts::told() const {
  std::string bytes;
  for (const WorkerStatus& status : mine_.workers()) {
    const ToldStatus told = told_from(status);
    bytes.append(reinterpret_cast<const char*>(&told), sizeof told);
  }
  return bytes;
}

void ReplicaExperts::hear(std::span<const std::string> of_ranks) {
  const std::lock_guard lock(mutex_);
  for (int rank = 0; rank < group_.size(); ++rank) {
    told_[rank].clear();
    const std::string& bytes = of_ranks[rank];
    for (size_t at = 0; at + sizeof(ToldStatus) <= bytes.size(); at += sizeof(ToldStatus)) {
      ToldStatus told;
      std::memcpy(&told, bytes.data() + at, sizeof told);
      told_[rank].push_back(status_from(told, rank));
    }
  }
}

}  // namespace tandem
