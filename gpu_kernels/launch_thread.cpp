#include "gpu_kernels/launch_thread.h"

#include <utility>

namespace tandem::gpu {

LaunchThread::LaunchThread(Stream& stream) : stream_(stream), thread_([this] { serve(); }) {}

LaunchThread::~LaunchThread() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void LaunchThread::launch(const Graph& graph) {
  {
    const std::lock_guard lock(mutex_);
    graph_ = &graph;
  }
  changed_.notify_all();
}

void LaunchThread::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !graph_; });
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

void LaunchThread::serve() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return closing_ || graph_; });
    if (!graph_) return;
    lock.unlock();
    std::exception_ptr failure;
    try {
      stream_.replay(*graph_);
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    failure_ = failure;
    graph_ = nullptr;
    changed_.notify_all();
  }
}

}  // namespace tandem::gpu
