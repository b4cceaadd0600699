#include "comm/delayed.h"

#include <sys/prctl.h>
#include <time.h>

#include <algorithm>
#include <cmath>

#include "comm/hosts.h"
#include "core/check.h"
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
  DelayedGroup(Group& group, const SimulatedNetwork& network)
      : group_(group), network_(network), delay_(nanoseconds(network.delay)), began_(group.size()) {
    for (int r = 0; r < group.size(); ++r)
      is_far_.push_back(network.host_of_rank.empty()
                            ? r != group.rank()
                            : network.host_of_rank[r] != network.host_of_rank[group.rank()]);
    n_far_ = std::count(is_far_.begin(), is_far_.end(), true);
  }
  DelayedGroup(std::unique_ptr<Group> group, const SimulatedNetwork& network)
      : DelayedGroup(*group, network) {
    owned_ = std::move(group);
  }
  int rank() const override { return group_.rank(); }
  int size() const override { return group_.size(); }
  int world_rank(int rank) const override { return group_.world_rank(rank); }
  void set_patience(Patience patience) override { group_.set_patience(patience); }

  void barrier() override {
    delayed({}, [&] { group_.barrier(); });
  }
  void broadcast(Bytes x, int root) override {
    const auto n = static_cast<int64_t>(x.size());
    const Crossing crossing =
        root == rank() ? Crossing{n * n_far_, 0} : Crossing{0, is_far_[root] ? n : 0};
    delayed(crossing, [&] { group_.broadcast(x, root); });
  }
  void all_gather(ConstBytes mine, Pieces<std::byte> out) override {
    const auto n = static_cast<int64_t>(mine.size());
    delayed({n * n_far_, far_bytes(out.sizes)}, [&] { group_.all_gather(mine, out); });
  }
  void all_to_all(Pieces<const std::byte> in, Pieces<std::byte> out) override {
    delayed({far_bytes(in.sizes), far_bytes(out.sizes)}, [&] { group_.all_to_all(in, out); });
  }
  std::unique_ptr<Group> split(int color) override {
    std::unique_ptr<Group> part = group_.split(color);
    if (!part) return nullptr;
    SimulatedNetwork network = network_;
    if (!network_.host_of_rank.empty()) {
      network.host_of_rank.clear();
      for (int r = 0; r < part->size(); ++r) {
        int here = 0;
        while (world_rank(here) != part->world_rank(r)) ++here;
        network.host_of_rank.push_back(network_.host_of_rank[here]);
      }
    }
    return std::make_unique<DelayedGroup>(std::move(part), network);
  }
  std::unique_ptr<Window> allocate_window(int64_t bytes) override {
    if (network_.host_of_rank.empty())
      return std::make_unique<DelayedWindow>(group_, bytes, delay_);
    require(n_far_ == 0, "the ranks are on several hosts, which share no memory");
    return group_.allocate_window(bytes);
  }
  void wait_for_rank(int rank, const std::function<bool()>& done) override {
    group_.wait_for_rank(rank, done);
  }

 private:
  // Bytes of a call that this rank sends to other hosts, and gets from them.
  struct Crossing {
    int64_t out = 0, in = 0;
  };
  int64_t far_bytes(std::span<const int64_t> sizes) const {
    int64_t sum = 0;
    for (int r = 0; r < size(); ++r) sum += is_far_[r] ? sizes[r] : 0;
    return sum;
  }
  int64_t nanoseconds_for(int64_t bytes) const {
    if (network_.bytes_per_second == 0) return 0;
    return nanoseconds(Delay(static_cast<double>(bytes) / network_.bytes_per_second));
  }
  // What a rank sends follows each other, and what it gets does.
  template <class Call>
  void delayed(const Crossing& crossing, const Call& call) {
    if (network_.bytes_sent) *network_.bytes_sent += crossing.out;
    const Began begin = {now(), crossing.out};
    call();
    if (delay_ == 0 && network_.bytes_per_second == 0) return;
    group_.all_gather_values(begin, std::span(began_));
    int64_t first = 0, end = 0;
    for (int r = 0; r < size(); ++r) {
      if (!is_far_[r]) continue;
      first = std::max(first, began_[r].at + delay_);
      end = std::max(end, began_[r].at + delay_ + nanoseconds_for(began_[r].bytes));
    }
    sleep_until(std::max(end, first + nanoseconds_for(crossing.in)));
  }

  std::unique_ptr<Group> owned_;
  Group& group_;
  const SimulatedNetwork network_;
  const int64_t delay_;
  std::vector<bool> is_far_;  // [ranks] on another host
  int64_t n_far_ = 0;
  struct Began {
    int64_t at, bytes;
  };
  std::vector<Began> began_;  // [ranks] the call
};

}  // namespace

std::unique_ptr<Group> make_delayed(Group& group, const SimulatedNetwork& network) {
  check(network.host_of_rank.empty() || std::ssize(network.host_of_rank) == group.size(),
        "a host for each rank");
  const std::vector<int> hosts = hosts_of_ranks(group);
  require(*std::max_element(hosts.begin(), hosts.end()) == 0,
          "--simulate-hosts, --simulate-delay and --simulate-rate: the ranks are on several hosts, "
          "whose clocks differ: start them on one host");
  return std::make_unique<DelayedGroup>(group, network);
}

}  // namespace tandem
