#include "comm/delayed.h"

#include <sys/prctl.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cmath>

#include "core/rounding.h"

namespace tandem {
namespace {

using Delay = std::chrono::duration<double>;

// Nanoseconds on the clock that all processes of a host share.
int64_t now() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

// By default the system may wake a thread 50 us late, which is much beside a message.
void sleep_until(int64_t end) {
  prctl(PR_SET_TIMERSLACK, 1000UL);
  const timespec time{end / 1'000'000'000, end % 1'000'000'000};
  while (now() < end) clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &time, nullptr);
}

int64_t nanoseconds(Delay delay) { return static_cast<int64_t>(std::llround(delay.count() * 1e9)); }

// When a rank told a number stands beside the window, for even and for odd numbers: a rank tells
// the next but one only when it has heard of the other.
class DelayedWindow final : public Window {
 public:
  DelayedWindow(Group& group, int64_t bytes, int64_t delay)
      : rank_(group.rank()),
        bytes_(bytes),
        delay_(delay),
        window_(group.allocate_window(round_up(bytes, kLine) + group.size() * kLine)) {}
  Bytes of(int rank) const override { return window_->of(rank).first(static_cast<size_t>(bytes_)); }
  void signal(int rank, uint64_t number) override {
    told_at(rank, rank_, number).store(now(), std::memory_order_relaxed);
    window_->signal(rank, number);
  }
  void wait(int rank, uint64_t number) override {
    window_->wait(rank, number);
    if (rank != rank_)
      sleep_until(told_at(rank_, rank, number).load(std::memory_order_relaxed) + delay_);
  }

 private:
  static constexpr int64_t kLine = 64;
  std::atomic_ref<int64_t> told_at(int owner, int from, uint64_t number) const {
    std::byte* const line = window_->of(owner).data() + round_up(bytes_, kLine) + from * kLine;
    return std::atomic_ref(reinterpret_cast<int64_t*>(line)[number % 2]);
  }

  const int rank_;
  const int64_t bytes_, delay_;
  const std::unique_ptr<Window> window_;
};

class DelayedGroup final : public Group {
 public:
  DelayedGroup(Group& group, int64_t delay) : group_(group), delay_(delay), began_(group.size()) {}
  DelayedGroup(std::unique_ptr<Group> group, int64_t delay)
      : owned_(std::move(group)), group_(*owned_), delay_(delay), began_(group_.size()) {}
  int rank() const override { return group_.rank(); }
  int size() const override { return group_.size(); }
  int world_rank(int rank) const override { return group_.world_rank(rank); }
  void set_patience(Patience patience) override { group_.set_patience(patience); }

  void barrier() override {
    delayed([&] { group_.barrier(); });
  }
  void broadcast(Bytes x, int root) override {
    delayed([&] { group_.broadcast(x, root); });
  }
  void all_gather(ConstBytes mine, Pieces<std::byte> out) override {
    delayed([&] { group_.all_gather(mine, out); });
  }
  void all_to_all(Pieces<const std::byte> in, Pieces<std::byte> out) override {
    delayed([&] { group_.all_to_all(in, out); });
  }
  std::unique_ptr<Group> split(int color) override {
    std::unique_ptr<Group> part = group_.split(color);
    return part ? std::make_unique<DelayedGroup>(std::move(part), delay_) : nullptr;
  }
  std::unique_ptr<Window> allocate_window(int64_t bytes) override {
    return std::make_unique<DelayedWindow>(group_, bytes, delay_);
  }
  void wait_for_rank(int rank, const std::function<bool()>& done) override {
    group_.wait_for_rank(rank, done);
  }

 private:
  template <class Call>
  void delayed(const Call& call) {
    const int64_t begin = now();
    call();
    group_.all_gather_values(begin, std::span(began_));
    began_[rank()] = 0;
    sleep_until(*std::max_element(began_.begin(), began_.end()) + delay_);
  }

  const std::unique_ptr<Group> owned_;
  Group& group_;
  const int64_t delay_;
  std::vector<int64_t> began_;  // [ranks] the call
};

}  // namespace

std::unique_ptr<Group> make_delayed(Group& group, std::chrono::duration<double> delay) {
  return std::make_unique<DelayedGroup>(group, nanoseconds(delay));
}

}  // namespace tandem
