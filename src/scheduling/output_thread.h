// A thread that runs jobs in order beside the computing thread: text, stop strings, receivers.
#pragma once
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace tandem {

class OutputThread {
 public:
  OutputThread() : thread_([this] { work(); }) {}
  ~OutputThread() { finish(); }
  OutputThread(const OutputThread&) = delete;
  OutputThread& operator=(const OutputThread&) = delete;

  // Blocks while kMaxPendingJobs jobs are waiting.
  void push(std::function<void()> job);
  // Returns when all jobs are done; nothing may be pushed afterwards.
  void finish();

 private:
  static constexpr size_t kMaxPendingJobs = 2;
  void work();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;
  bool finished_ = false;
  std::thread thread_;
};

}  // namespace tandem
