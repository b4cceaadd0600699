#include "core/team.h"

#include <hwloc.h>
#include <immintrin.h>

#include <algorithm>

#include "core/check.h"

namespace tandem {
namespace {

class Topology {
 public:
  Topology() {
    hwloc_topology_init(&handle_);
    hwloc_topology_load(handle_);  // holds only what this process is allowed to use
  }
  ~Topology() { hwloc_topology_destroy(handle_); }
  Topology(const Topology&) = delete;
  Topology& operator=(const Topology&) = delete;

  int n_cores() const { return std::max(1, hwloc_get_nbobjs_by_type(handle_, HWLOC_OBJ_CORE)); }

  // A refusal (a container without the right to pin) costs speed, not correctness.
  void pin_this_thread(int core) const {
    const hwloc_obj_t object = hwloc_get_obj_by_type(handle_, HWLOC_OBJ_CORE, core);
    if (!object) return;
    hwloc_cpuset_t one = hwloc_bitmap_dup(object->cpuset);
    hwloc_bitmap_singlify(one);
    hwloc_set_cpubind(handle_, one, HWLOC_CPUBIND_THREAD);
    hwloc_bitmap_free(one);
  }

 private:
  hwloc_topology_t handle_ = nullptr;
};

// About 50 us: longer than the gap between two operations of a step, shorter than anyone would
// notice.
constexpr int kSpins = 1000;

constexpr uint64_t kGeneration = uint64_t{1} << 32;

}  // namespace

int n_cores() { return Topology().n_cores(); }

Team::Team(int n_threads) {
  const Topology topology;
  const int cores = topology.n_cores();
  require(n_threads >= 0 && n_threads <= cores,
          "--threads {}: this process may use {} cores; give a number from 1 to {}, or 0 for all "
          "of them",
          n_threads, cores, cores);
  if (n_threads == 0) n_threads = cores;
  topology.pin_this_thread(0);
  std::atomic<int> n_pinned{0};
  for (int thread = 1; thread < n_threads; ++thread)
    workers_.emplace_back([this, thread, &topology, &n_pinned] {
      topology.pin_this_thread(thread);
      ++n_pinned;
      serve(thread);
    });
  while (n_pinned < n_threads - 1) std::this_thread::yield();
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
  check(n_items < static_cast<int64_t>(kGeneration), "Team::run: too many items");
  const uint64_t generation =
      (ticket_.load(std::memory_order_relaxed) / kGeneration + 1) * kGeneration;
  ticket_.store(generation - 1);  // no item is left under any ticket while the fields change
  n_done_.store(0, std::memory_order_relaxed);
  call_.store(call, std::memory_order_relaxed);
  work_.store(work, std::memory_order_relaxed);
  n_items_.store(n_items, std::memory_order_release);
  ticket_.store(generation);
  if (n_asleep_.load() > 0) {
    ++wake_;
    wake_.notify_all();
  }
  while (claim_and_run(0)) {
  }
  for (int spin = 0; n_done_.load(std::memory_order_acquire) < n_items; ++spin)
    spin < kSpins ? _mm_pause() : std::this_thread::yield();
}

// One item of the current job, if any is left. A claim succeeds only under the ticket of a job that
// has items left, and the fields do not change while it has: what was read of them belongs to it.
bool Team::claim_and_run(int thread) {
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

void Team::serve(int thread) {
  int spins = 0;
  while (!stop_.load(std::memory_order_relaxed)) {
    if (claim_and_run(thread)) {
      spins = 0;
    } else if (++spins < kSpins) {
      _mm_pause();
    } else {
      // Announce the sleep, then look once more: a job published in between is seen, one published
      // later wakes us.
      const uint32_t before = wake_.load();
      ++n_asleep_;
      const bool work_left = claim_and_run(thread);
      if (!work_left && !stop_) wake_.wait(before);
      --n_asleep_;
      spins = 0;
    }
  }
}

}  // namespace tandem
