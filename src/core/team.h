// The compute threads: one per core, pinned to it, grouped by NUMA node. Threads claim work item by
// item, so a preempted thread delays only the item it holds; idle threads sleep. docs/threads.md
// explains why OpenMP is not used.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <thread>
#include <type_traits>
#include <vector>

#include "core/core_turns.h"
#include "core/progress_watch.h"
#include "core/topology.h"

namespace tandem {

// Number of physical cores that this process may run on.
int n_cores();

class Team {
 public:
  // One thread for each core of `topology`. The calling thread is one of them, pinned to the first
  // core until the team is destroyed. Threads that cannot be pinned run on any core.
  explicit Team(const Topology& topology);
  // A team on n_threads cores of this machine, chosen by with_threads().
  explicit Team(int n_threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return static_cast<int>(workers_.size()) + 1; }
  const Topology& topology() const { return topology_; }
  int n_nodes() const { return topology_.n_nodes(); }
  int size_of_node(int node) const { return static_cast<int>(topology_.nodes[node].cpus.size()); }
  int n_unpinned() const { return n_unpinned_; }

  // There is work while items are unclaimed or running; an item that begins or ends is an event.
  // Jobs of one item, which the caller runs directly, do not count. May be called from any thread.
  WorkProgress progress() const;

  // Until end() or destruction, idle threads poll instead of sleeping. For a caller that waits for
  // an event after which the team must start without the latency of a wake-up. Null: no effect.
  class Awake {
   public:
    explicit Awake(Team* team) : team_(team) {
      if (!team_) return;
      ++team_->n_awake_;
      team_->wake_sleepers();
    }
    ~Awake() { end(); }
    Awake(const Awake&) = delete;
    Awake& operator=(const Awake&) = delete;
    void end() {
      if (team_) --team_->n_awake_;
      team_ = nullptr;
    }

   private:
    Team* team_;
  };

  // Calls work(item, thread) once for every item in [0, n_items), thread in [0, size()), and
  // returns when all are done. Items are claimed in ascending order. Only one thread may call it at
  // a time; work may not call it.
  template <class Work>
  void run(int64_t n_items, Work&& work) {
    using Type = std::remove_reference_t<Work>;
    run_items(
        n_items, [](void* w, int64_t item, int thread) { (*static_cast<Type*>(w))(item, thread); },
        const_cast<void*>(static_cast<const void*>(&work)));
  }

  // Like run(), with separate items for each node: calls work(node, item, thread of that node) once
  // for every item in [0, n_items[node]), on a thread of that node, all nodes concurrently. Items
  // of one node are claimed in ascending order, so work may wait_until() an earlier item of its
  // node is done.
  template <class Work>
  void run_on_nodes(std::span<const int64_t> n_items, Work&& work) {
    const auto on_node = [&](int64_t item, int thread) {
      const Place& place = places_[thread];
      work(place.node, item, place.thread);
    };
    using Type = decltype(on_node);
    run_node_items(
        n_items, [](void* w, int64_t item, int thread) { (*static_cast<Type*>(w))(item, thread); },
        const_cast<void*>(static_cast<const void*>(&on_node)));
  }

 private:
  using Call = void (*)(void* work, int64_t item, int thread);

  // Holds one job at a time; threads claim its items one by one.
  class alignas(128) Queue {
   public:
    void publish(int64_t n_items, Call call, void* work);
    bool claim_and_run(int thread);
    void wait() const;
    WorkProgress progress() const;

   private:
    // Generation of the job in the upper 32 bits, next item in the lower 32: a claim made for an
    // older job fails.
    std::atomic<uint64_t> ticket_{0};
    std::atomic<int64_t> n_items_{0}, n_done_{0};
    std::atomic<Call> call_{nullptr};
    std::atomic<void*> work_{nullptr};
  };
  struct Place {
    int node, thread;  // `thread` counts within the node
  };

  void run_items(int64_t n_items, Call call, void* work);
  void run_node_items(std::span<const int64_t> n_items, Call call, void* work);
  bool claim_and_run(int thread);
  void serve(int thread);
  void wake_sleepers();

  struct alignas(64) Turns : CoreTurns {};  // one cache line per thread

  const Topology topology_;
  std::vector<Place> places_;  // [threads]
  std::vector<Turns> turns_;   // [threads]
  Queue for_all_;
  const std::unique_ptr<Queue[]> for_node_;  // [nodes]
  std::atomic<uint32_t> wake_{0};            // changes when sleeping threads must look for work
  std::atomic<int> n_asleep_{0};
  std::atomic<int> n_awake_{0};  // Awake objects
  std::atomic<bool> stop_{false};
  const Pin pin_;  // pins the calling thread
  int n_unpinned_ = 0;
  std::vector<std::thread> workers_;
};

// One iteration of a wait loop: the first turns pause, later ones yield the core to other threads.
void wait_a_turn(int turn);

// Returns when condition() holds; another thread must make it hold.
template <class Condition>
void wait_until(Condition condition) {
  for (int turn = 0; !condition(); ++turn) wait_a_turn(turn);
}

}  // namespace tandem
