#include "comm/local_world.h"

#include <algorithm>
#include <cstdlib>

#include "comm/waiting.h"

namespace tandem {

void LocalWorld::count_call(int rank) {
  const int64_t call = ranks_[rank].n_calls++;
  if (!loss_ || loss_->rank != rank || loss_->call != call) return;
  const auto others_ended = [&] {
    for (int r = 0; r < static_cast<int>(ranks_.size()); ++r)
      if (r != rank && !ranks_[r].ended) return false;
    return true;
  };
  if (loss_->stops) wait_for(others_ended, {std::chrono::hours(1)});
  throw Lost();
}

void LocalWorld::wait(int rank, int other, const std::function<bool()>& done, Patience patience) {
  if (done()) return;
  std::atomic<int>& waits_for = claimed(ranks_[rank], other);
  wait_for([&] { return done() || failed_ || ranks_[other].ended; }, patience);
  if (done()) {
    waits_for = -1;
    return;
  }
  if (ranks_[other].ended) give_up(other, fmt::format("rank {} has ended", other));
  const int lost = lost_rank(other);
  if (lost < 0) give_up(-1, "ranks wait for each other: their calls differ");
  give_up(lost, fmt::format("rank {} does not answer", lost));
}

// A place of the rank in which the calling thread says that it waits for `other`.
std::atomic<int>& LocalWorld::claimed(Rank& rank, int other) {
  for (std::atomic<int>& place : rank.waits_for) {
    int free = -1;
    if (place.compare_exchange_strong(free, other)) return place;
  }
  check(false, "threads of a rank that wait at the same time");
  std::abort();
}

// The end of the chain of ranks that wait for each other; -1: a circle.
int LocalWorld::lost_rank(int waited_for) const {
  for (size_t steps = 0; steps < ranks_.size(); ++steps) {
    const auto& all = ranks_[waited_for].waits_for;
    const auto next = std::find_if(all.begin(), all.end(), [](const auto& w) { return w >= 0; });
    if (next == all.end()) return waited_for;
    waited_for = *next;
  }
  return -1;
}

void LocalWorld::give_up(int lost, const std::string& why) {
  {
    const std::lock_guard lock(mutex_);
    if (!failed_) lost_ = lost, why_ = why;
    failed_ = true;
  }
  const auto copies = [](const Rank& r) { return r.n_copies > 0; };
  wait_for([&] { return std::none_of(ranks_.begin(), ranks_.end(), copies); },
           {std::chrono::hours(1)});
  const std::lock_guard lock(mutex_);
  throw GroupError(lost_, why_);
}

// Either the rank that gives up sees `n_copies`, or this one sees `failed_`.
LocalWorld::Copying::Copying(LocalWorld& world, int rank) : n_copies_(world.ranks_[rank].n_copies) {
  ++n_copies_;
  if (!world.failed_) return;
  --n_copies_;
  world.give_up(-1, "");
}

}  // namespace tandem
