// Detects that work hangs: a thread of a team that never ends its item, or a GPU that waits for
// another rank. What waits for it cannot be unwound.
#pragma once
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>

namespace tandem {

// events changes whenever the work gets on; it means nothing without work.
struct WorkProgress {
  bool has_work;
  uint64_t events;
};

class ProgressWatch {
 public:
  // Calls on_hang, from a thread of its own, when there is work and no event for `patience`; once
  // per hang. `progress` may be called as long as the object lives. Time in which the program was
  // stopped (Ctrl-Z) does not count.
  ProgressWatch(std::function<WorkProgress()> progress, std::chrono::milliseconds patience,
                std::function<void()> on_hang);
  ~ProgressWatch();
  ProgressWatch(const ProgressWatch&) = delete;
  ProgressWatch& operator=(const ProgressWatch&) = delete;

 private:
  static constexpr int kLooks = 8;  // looks at the progress within `patience`
  void look(std::chrono::milliseconds between, const std::function<void()>& on_hang);

  const std::function<WorkProgress()> progress_;
  std::mutex mutex_;
  std::condition_variable stopped_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace tandem
