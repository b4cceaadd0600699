#include "core/background_thread.h"

#include <sys/prctl.h>

#include <utility>

#include "core/check.h"

namespace tandem {

BackgroundThread::BackgroundThread() : thread_([this] { serve(); }) {}

BackgroundThread::~BackgroundThread() {
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void BackgroundThread::start(const std::function<void()>& call) {
  {
    const std::lock_guard lock(mutex_);
    check(!call_ && !error_, "a call begins after the one before");
    call_ = &call;
  }
  changed_.notify_all();
}

void BackgroundThread::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !call_; });
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

// What the thread waits for is short, so it asks not to be woken later than need be: the system
// adds up to 50 us to the sleep of other threads.
void BackgroundThread::serve() {
  prctl(PR_SET_TIMERSLACK, 1000UL);
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return call_ || stops_; });
    if (!call_) return;
    lock.unlock();
    std::exception_ptr error;
    try {
      (*call_)();
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    error_ = error;
    call_ = nullptr;
    changed_.notify_all();
  }
}

}  // namespace tandem
