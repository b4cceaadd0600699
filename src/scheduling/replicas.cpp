#include "scheduling/replicas.h"

#include <utility>

namespace tandem {

Replicas::Replicas(int n, const Scheduler::Limits& limits) : n_expected_(n) {
  schedulers_.reserve(n);
  for (int i = 0; i < n; ++i) schedulers_.emplace_back(limits);
}

int Replicas::best_for(std::span<const int32_t> prompt) const {
  if (n() == 1) return 0;
  const auto cost = [&](int replica) {
    const Scheduler& s = at(replica);
    const int64_t n_new = std::ssize(prompt) - s.n_cached(prompt);
    const Scheduler::Counts counts = s.counts();
    return std::pair(s.n_pending() + n_expected_[replica] + n_new,
                     counts.n_running + counts.n_waiting + n_expected_[replica]);
  };
  int best = 0;
  for (int replica = 1; replica < n(); ++replica)
    if (cost(replica) < cost(best)) best = replica;
  return best;
}

void Replicas::add(SequenceId id, std::vector<int32_t> prompt, int n_scored) {
  const auto expected = expected_.find(id);
  const int replica = expected != expected_.end() ? expected->second : best_for(prompt);
  dismiss(id);
  replica_of_[id] = replica;
  at(replica).add(id, std::move(prompt), n_scored);
}

void Replicas::remove(SequenceId id) {
  of(id).remove(id);
  replica_of_.erase(id);
}

void Replicas::expect(SequenceId id, int replica) {
  expected_[id] = replica;
  ++n_expected_[replica];
}

void Replicas::dismiss(SequenceId id) {
  if (const auto entry = expected_.extract(id)) --n_expected_[entry.mapped()];
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
