#include "comm/heartbeat.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

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
  std::vector<Beat> beats(group_->size());
  std::vector<int64_t> n_bytes(group_->size());
  const auto all_are_ready = [&] {
    return std::all_of(beats.begin(), beats.end(),
                       [](const Beat& beat) { return beat.state == State::kReady; });
  };
  try {
    group_->set_patience({patience_.limit, true});
    while (true) {
      const State mine = own_state(interval_, State::kReady);
      const std::string news = own_news();
      group_->all_gather_values(Beat{mine, std::ssize(news)}, std::span(beats));
      if (all_are_ready()) return;
      const auto left = std::find_if(beats.begin(), beats.end(),
                                     [](const Beat& beat) { return beat.state == State::kLeaves; });
      if (left == beats.end()) {
        std::transform(beats.begin(), beats.end(), n_bytes.begin(),
                       [](const Beat& beat) { return beat.n_bytes; });
        hear_news(news, n_bytes);
        continue;
      }
      if (own_state(patience_.limit, State::kLeaves) == State::kLeaves) return;
      const int rank = group_->world_rank(static_cast<int>(left - beats.begin()));
      return on_lost_({rank, fmt::format("rank {} has ended before the others", rank)});
    }
  } catch (const GroupError& error) {
    report(error);
  }
}

bool Heartbeat::tell(const void* teller, News news) {
  const std::lock_guard lock(news_mutex_);
  if (teller_) return false;
  teller_ = teller;
  news_ = std::move(news);
  return true;
}

void Heartbeat::forget(const void* teller) {
  const std::lock_guard lock(news_mutex_);
  if (teller_ != teller) return;
  teller_ = nullptr;
  news_ = {};
}

std::string Heartbeat::own_news() {
  const std::lock_guard lock(news_mutex_);
  return teller_ ? news_.mine() : "";
}

// Nothing travels where no rank has news. n_bytes: [ranks].
void Heartbeat::hear_news(const std::string& mine, std::span<const int64_t> n_bytes) {
  std::string all(std::accumulate(n_bytes.begin(), n_bytes.end(), int64_t{0}), '\0');
  if (all.empty()) return;
  group_->all_gather(std::as_bytes(std::span(mine)),
                     {std::as_writable_bytes(std::span(all)), n_bytes});
  std::vector<std::string> of_ranks;
  for (size_t at = 0; const int64_t n : n_bytes) {
    of_ranks.push_back(all.substr(at, n));
    at += n;
  }
  const std::lock_guard lock(news_mutex_);
  if (teller_) news_.of_ranks(of_ranks);
}

// This rank's other threads may have noticed too, and end it.
void Heartbeat::report(const GroupError& error) {
  constexpr std::chrono::seconds kOthersReport(2);
  if (own_state(kOthersReport, State::kLeaves) != State::kLeaves) on_lost_(error);
}

}  // namespace tandem
