#include "core/progress_watch.h"

#include <utility>

namespace tandem {

ProgressWatch::ProgressWatch(std::function<WorkProgress()> progress,
                             std::chrono::milliseconds patience, std::function<void()> on_hang)
    : progress_(std::move(progress)), thread_([this, patience, on_hang = std::move(on_hang)] {
        look(patience / kLooks, on_hang);
      }) {}

ProgressWatch::~ProgressWatch() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  stopped_.notify_one();
  thread_.join();
}

// Counts looks rather than time: a stopped program (Ctrl-Z) does not look.
void ProgressWatch::look(std::chrono::milliseconds between, const std::function<void()>& on_hang) {
  std::unique_lock lock(mutex_);
  WorkProgress last = progress_();
  int n_alike = 0;
  while (!stopped_.wait_for(lock, between, [&] { return stop_; })) {
    const WorkProgress now = progress_();
    n_alike = now.has_work && now.events == last.events ? n_alike + 1 : 0;
    last = now;
    if (n_alike == kLooks) on_hang();
  }
}

}  // namespace tandem
