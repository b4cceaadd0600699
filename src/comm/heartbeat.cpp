#include "comm/heartbeat.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

namespace tandem {

Heartbeat::Heartbeat(Group& group, OnLost on_lost, Patience patience,
                     std::chrono::duration<double> interval)
    : group_(group.split(0)),
      on_lost_(std::move(on_lost)),
      patience_(patience),
      interval_(interval),
      thread_([this] { beat(); }) {}

void Heartbeat::stop(State state) {
  {
    const std::lock_guard lock(mutex_);
    state_ = state;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

// This rank's state once it is `until`, or any after kPrepares, at the latest after `wait`.
Heartbeat::State Heartbeat::own_state(std::chrono::duration<double> wait, State until) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, wait, [&] { return state_ >= until; });
  return state_;
}

// All ranks see the same states, so all make the same calls: none after the one in which all are
// ready or one leaves.
void Heartbeat::beat() {
  std::vector<State> states(group_->size());
  try {
    group_->set_patience({patience_.limit, true});
    while (true) {
      const State mine = own_state(interval_, State::kReady);
      group_->all_gather_values(mine, std::span(states));
      if (std::all_of(states.begin(), states.end(), [](State s) { return s == State::kReady; }))
        return;
      const auto left = std::find(states.begin(), states.end(), State::kLeaves);
      if (left == states.end()) continue;
      if (own_state(patience_.limit, State::kLeaves) == State::kLeaves) return;
      const int rank = group_->world_rank(static_cast<int>(left - states.begin()));
      return on_lost_({rank, fmt::format("rank {} has ended before the others", rank)});
    }
  } catch (const GroupError& error) {
    report(error);
  }
}

// This rank's other threads may have noticed too, and end it.
void Heartbeat::report(const GroupError& error) {
  constexpr std::chrono::seconds kOthersReport(2);
  if (own_state(kOthersReport, State::kLeaves) != State::kLeaves) on_lost_(error);
}

}  // namespace tandem
