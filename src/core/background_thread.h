// A thread that makes calls for another thread, one at a time, and sleeps in between.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

namespace tandem {

class BackgroundThread {
 public:
  // kAtOnce: it runs as soon as what it sleeps for has come, also where others compute on its core.
  enum class Wakes : uint8_t { kUsually, kAtOnce };
  explicit BackgroundThread(Wakes wakes = Wakes::kUsually);
  ~BackgroundThread();  // waits for the call under way
  BackgroundThread(const BackgroundThread&) = delete;
  BackgroundThread& operator=(const BackgroundThread&) = delete;

  // Begins call(), which must live until wait() has returned. The call before has been waited for.
  void start(const std::function<void()>& call);
  // Returns when the call has ended, or there was none, and throws what it threw.
  void wait();

 private:
  void serve(Wakes wakes);

  std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  const std::function<void()>* call_ = nullptr;  // not ended yet
  std::exception_ptr error_;
  bool stops_ = false;
  std::thread thread_;  // the last member: it uses all others
};

}  // namespace tandem
