#include "scheduling/output_thread.h"

#include <utility>

namespace tandem {

void OutputThread::push(std::function<void()> job) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return jobs_.size() < kMaxPendingJobs; });
  jobs_.push_back(std::move(job));
  changed_.notify_all();
}

void OutputThread::finish() {
  {
    const std::lock_guard lock(mutex_);
    finished_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void OutputThread::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return finished_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    std::function<void()> job = std::exchange(jobs_.front(), {});
    jobs_.pop_front();
    changed_.notify_all();
    lock.unlock();
    job();
    job = {};  // frees what the job holds before finish() can return
    lock.lock();
  }
}

}  // namespace tandem
