#include "scheduling/replicas.h"

#include <utility>

namespace tandem {

Replicas::Replicas(int n, const Scheduler::Limits& limits) {
  schedulers_.reserve(n);
  for (int i = 0; i < n; ++i) schedulers_.emplace_back(limits);
}

int Replicas::least_busy(std::span<const int32_t> prompt) const {
  const auto cost = [&](int replica) {
    const Scheduler& s = at(replica);
    const int64_t n_new = std::ssize(prompt) - s.n_cached(prompt);
    const Scheduler::Counts counts = s.counts();
    return std::pair(s.n_pending() + n_new, counts.n_running + counts.n_waiting);
  };
  int best = 0;
  for (int replica = 1; replica < n(); ++replica)
    if (cost(replica) < cost(best)) best = replica;
  return best;
}

void Replicas::add(SequenceId id, std::vector<int32_t> prompt, int n_scored) {
  const int replica = n() == 1 ? 0 : least_busy(prompt);
  replica_of_[id] = replica;
  at(replica).add(id, std::move(prompt), n_scored);
}

void Replicas::remove(SequenceId id) {
  of(id).remove(id);
  replica_of_.erase(id);
}

void Replicas::set_rates(const SwapRates& rates) {
  for (Scheduler& s : schedulers_) s.set_rates(rates);
}

void Replicas::assume_cached(std::span<const int32_t> tokens) {
  for (Scheduler& s : schedulers_) s.assume_cached(tokens);
}

void Replicas::forget_pages() {
  for (Scheduler& s : schedulers_) s.forget_pages();
}

Scheduler::Counts Replicas::counts() const {
  Scheduler::Counts sum;
  for (const Scheduler& s : schedulers_) sum += s.counts();
  return sum;
}

}  // namespace tandem
