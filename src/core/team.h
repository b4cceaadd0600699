// The threads that compute, one a core and pinned to it. Work is claimed in pieces, so a thread
// whose core is taken by another process delays only the piece it holds; idle threads sleep.
// (docs/threads.md says why not OpenMP.)
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>
#include <type_traits>
#include <vector>

namespace tandem {

// Physical cores this process is allowed to run on (hwloc).
int n_cores();

class Team {
 public:
  // n_threads counts the caller, which works too; 0 = one a core. Throws Error for a negative
  // number or more threads than cores.
  explicit Team(int n_threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return static_cast<int>(workers_.size()) + 1; }

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

 private:
  using Call = void (*)(void* work, int64_t item, int thread);
  void run_items(int64_t n_items, Call call, void* work);
  bool claim_and_run(int thread);
  void serve(int thread);

  // Generation of the job in the upper half, next item in the lower: a claim of an old job's item
  // fails.
  std::atomic<uint64_t> ticket_{0};
  std::atomic<int64_t> n_items_{0}, n_done_{0};
  std::atomic<Call> call_{nullptr};
  std::atomic<void*> work_{nullptr};
  std::atomic<uint32_t> wake_{0};  // changes when there is work for sleepers, or the end
  std::atomic<int> n_asleep_{0};
  std::atomic<bool> stop_{false};
  std::vector<std::thread> workers_;
};

}  // namespace tandem
