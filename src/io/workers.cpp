#include "io/workers.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "core/clock.h"

namespace tandem {

void Workers::run(int n_workers, int64_t n_items, const std::function<void(int64_t, int)>& work,
                  const Report& report) {
  const auto start = Clock::now();
  const auto tell = [&] { report(seconds_since(start)); };
  n_running_ = static_cast<int>(std::min<int64_t>(n_workers, n_items));
  std::vector<std::jthread> threads;
  for (int i = n_running_; i > 0; --i)
    threads.emplace_back([&, i] { serve(i - 1, n_items, work); });
  try {
    std::unique_lock lock(mutex_);
    while (!idle_.wait_for(lock, std::chrono::milliseconds(100), [&] { return n_running_ == 0; })) {
      lock.unlock();
      tell();
      lock.lock();
    }
  } catch (...) {
    stop(std::current_exception());
  }
  threads.clear();
  if (error_) std::rethrow_exception(error_);
  tell();
}

void Workers::serve(int worker, int64_t n_items, const std::function<void(int64_t, int)>& work) {
  try {
    for (int64_t i = next_++; i < n_items && !stopped_; i = next_++) work(i, worker);
  } catch (...) {
    stop(std::current_exception());
  }
  const std::lock_guard lock(mutex_);
  if (--n_running_ == 0) idle_.notify_one();
}

void Workers::stop(std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  if (!error_) error_ = std::move(error);
  stopped_ = true;
}

}  // namespace tandem
