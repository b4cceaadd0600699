#include "core/team.h"

#include <immintrin.h>
#include <sys/resource.h>

#include <chrono>

#include "core/check.h"

namespace tandem {
namespace {

// About 50 us of polling: longer than the gap between two operations of a step, and short enough
// that an idle team uses almost no CPU time.
constexpr int kSpins = 1000;

constexpr uint64_t kGeneration = uint64_t{1} << 32;

int64_t nanoseconds() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// How often the operating system has preempted this thread.
int64_t preemptions() {
  rusage usage{};
  getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_nivcsw;
}

}  // namespace

int n_cores() { return this_topology().n_cores(); }

Team::Team(int n_threads) : Team(with_threads(this_topology(), n_threads)) {}

Team::Team(const Topology& topology)
    : topology_(topology),
      for_node_(std::make_unique<Queue[]>(topology.n_nodes())),
      pin_(topology, topology.nodes[0].cpus[0]) {
  for (int node = 0; node < n_nodes(); ++node)
    for (int thread = 0; thread < size_of_node(node); ++thread) places_.push_back({node, thread});
  turns_.resize(places_.size());
  std::atomic<int> n_ready{1}, n_pinned{pin_.holds() ? 1 : 0};
  const auto n_threads = static_cast<int>(places_.size());
  for (int thread = 1; thread < n_threads; ++thread)
    workers_.emplace_back([&, thread] {
      const auto [node, core] = places_[thread];
      const Pin pin(topology_, topology_.nodes[node].cpus[core]);
      n_pinned += pin.holds() ? 1 : 0;
      ++n_ready;
      serve(thread);
    });
  while (n_ready < n_threads) std::this_thread::yield();
  n_unpinned_ = n_threads - n_pinned;
}

Team::~Team() {
  stop_ = true;
  ++wake_;
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void Team::run_items(int64_t n_items, Call call, void* work) {
  if (n_items == 1 || workers_.empty()) {
    for (int64_t item = 0; item < n_items; ++item) call(work, item, 0);
    return;
  }
  for_all_.publish(n_items, call, work);
  wake_sleepers();
  while (claim_and_run(0)) {
  }
  for_all_.wait();
}

void Team::run_node_items(std::span<const int64_t> n_items, Call call, void* work) {
  check(std::ssize(n_items) == n_nodes(), "Team::run_on_nodes: a number of items for each node");
  if (n_nodes() == 1) return run_items(n_items[0], call, work);
  for (int node = 0; node < n_nodes(); ++node) for_node_[node].publish(n_items[node], call, work);
  wake_sleepers();
  while (claim_and_run(0)) {
  }
  for (int node = 0; node < n_nodes(); ++node) for_node_[node].wait();
}

// Runs one item of the current job; false if none is left.
bool Team::claim_and_run(int thread) {
  if (!for_all_.claim_and_run(thread) && !for_node_[places_[thread].node].claim_and_run(thread))
    return false;
  if (turns_[thread].item_ended(nanoseconds(), preemptions)) {
    std::this_thread::yield();
    turns_[thread].yielded(nanoseconds());
  }
  return true;
}

WorkProgress Team::progress() const {
  WorkProgress all = for_all_.progress();
  for (int node = 0; node < n_nodes(); ++node) {
    const WorkProgress one = for_node_[node].progress();
    all = {all.has_work || one.has_work, all.events + one.events};
  }
  return all;
}

void Team::wake_sleepers() {
  if (n_asleep_.load() == 0) return;
  ++wake_;
  wake_.notify_all();
}

void Team::serve(int thread) {
  int spins = 0;
  while (!stop_.load(std::memory_order_relaxed)) {
    if (claim_and_run(thread)) {
      spins = 0;
    } else if (++spins < kSpins || n_awake_.load(std::memory_order_relaxed) > 0) {
      _mm_pause();
    } else {
      // Announce the sleep, then look once more: a job published or an Awake made before the
      // announcement is seen here, a later one wakes this thread.
      const uint32_t before = wake_.load();
      ++n_asleep_;
      const bool work_left = claim_and_run(thread);
      if (!work_left && !stop_ && n_awake_ == 0) wake_.wait(before);
      --n_asleep_;
      spins = 0;
    }
  }
}

void Team::Queue::publish(int64_t n_items, Call call, void* work) {
  check(n_items < static_cast<int64_t>(kGeneration), "Team: too many items");
  const uint64_t generation =
      (ticket_.load(std::memory_order_relaxed) / kGeneration + 1) * kGeneration;
  ticket_.store(generation - 1);  // no item is left under any ticket while the fields change
  n_done_.store(0, std::memory_order_relaxed);
  call_.store(call, std::memory_order_relaxed);
  work_.store(work, std::memory_order_relaxed);
  n_items_.store(n_items, std::memory_order_release);
  ticket_.store(generation);
}

// A claim succeeds only under the ticket of a job that has items left, and the fields do not change
// while it has any. So the fields that were read belong to the claimed job.
bool Team::Queue::claim_and_run(int thread) {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  while (true) {
    const auto item = static_cast<int64_t>(ticket % kGeneration);
    const Call call = call_.load(std::memory_order_relaxed);
    void* work = work_.load(std::memory_order_relaxed);
    if (item >= n_items_.load(std::memory_order_acquire)) return false;
    if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
    call(work, item, thread);
    n_done_.fetch_add(1, std::memory_order_release);
    return true;
  }
}

void Team::Queue::wait() const {
  wait_until([&] {
    return n_done_.load(std::memory_order_acquire) >= n_items_.load(std::memory_order_relaxed);
  });
}

// The numbers are not read atomically together, so one result may be inconsistent; callers poll, so
// the next result corrects it.
WorkProgress Team::Queue::progress() const {
  const auto n_done = static_cast<uint64_t>(n_done_.load(std::memory_order_relaxed));
  const bool has_work = n_done < static_cast<uint64_t>(n_items_.load(std::memory_order_relaxed));
  return {has_work, ticket_.load(std::memory_order_relaxed) + n_done};
}

void wait_a_turn(int turn) {
  if (turn < kSpins) {
    _mm_pause();
  } else {
    std::this_thread::yield();
  }
}

}  // namespace tandem
