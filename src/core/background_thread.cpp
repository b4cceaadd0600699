#include "core/background_thread.h"

#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <utility>

#include "core/check.h"

namespace tandem {
namespace {

// Sets the calling thread up to run as soon as what it sleeps for has come, also where other
// threads compute on its core. It then has little to do, but other ranks wait for it.
void run_at_once() {
  // The system adds up to 50 us to the sleep of other threads.
  prctl(PR_SET_TIMERSLACK, 1000UL);
  // A thread that asks for short turns comes before those with turns of milliseconds (Linux 6.12).
  struct {
    uint32_t size = 48, policy = SCHED_OTHER;
    uint64_t flags = 0;
    int32_t nice = 0;
    uint32_t priority = 0;
    uint64_t turn_ns = 100'000, unused[2] = {};
  } wanted;
  syscall(SYS_sched_setattr, 0, &wanted, 0U);
  // So does one of higher priority, where this process may ask for that.
  setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), -10);
}

}  // namespace

BackgroundThread::BackgroundThread(Wakes wakes) : thread_([this, wakes] { serve(wakes); }) {}

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

void BackgroundThread::serve(Wakes wakes) {
  if (wakes == Wakes::kAtOnce) run_at_once();
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
