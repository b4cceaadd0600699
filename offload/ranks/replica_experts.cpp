#include "offload/ranks/replica_experts.h"

#include <algorithm>
#include <array>
#include <string_view>

namespace tandem {

Ticket ReplicaExperts::start(const ExpertBatch& batch) {
  if (batch.x.rows == 0) return batch.micro_batch;
  has_tokens_ = true;
  step_.unless_failed([&] { workers_.submit(batch); });
  return batch.micro_batch;
}

void ReplicaExperts::add_to(Ticket ticket, TensorView y) {
  if (y.rows > 0) step_.unless_failed([&] { workers_.add_to(ticket, y); });
}

void ReplicaExperts::begin_step(std::span<const Batch> replicas, int n_micro_batches) {
  has_tokens_ = false;
  workers_.begin_step(replicas, n_micro_batches);
}

std::optional<double> ReplicaExperts::seconds_waited() const {
  return has_tokens_ ? workers_.seconds_waited() : std::nullopt;
}

void ReplicaExperts::end_step(LayerRange layers, const MicroBatches& step) {
  ExpertPool::end_step(layers, step);
  std::array<char, 960> text = {};  // longer ones are cut
  char failed = 0;
  try {
    step_.end();
  } catch (const StepFailed& error) {
    failed = 1;
    const std::string_view why = error.what();
    std::copy_n(why.begin(), std::min(why.size(), text.size() - 1), text.begin());
  }
  group_.all_gather_values(failed, std::span(failed_));
  const auto first = std::find(failed_.begin(), failed_.end(), 1);
  if (first == failed_.end()) return;
  group_.broadcast(std::as_writable_bytes(std::span(text)),
                   static_cast<int>(first - failed_.begin()));
  if (group_.rank() == 0) throw StepFailed(text.data());
}

}  // namespace tandem
