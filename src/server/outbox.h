// Bytes of an answer on their way from the engine's output thread to the thread of the connections.
#pragma once
#include <functional>
#include <mutex>
#include <string>

#include "server/generation.h"

namespace tandem {

class Outbox {
 public:
  // `wake` is called from the output thread when there is something new, once until it is taken.
  explicit Outbox(std::function<void()> wake) : wake_(std::move(wake)) {}

  // Beyond so many bytes that nobody takes, the client counts as gone.
  static constexpr size_t kMostBytes = size_t{4} << 20;

  void push(const Generation::Output& output) {
    bool wakes = false;
    {
      const std::lock_guard lock(mutex_);
      all_.bytes += output.bytes;
      all_.status = output.status;
      all_.last = output.last;
      all_.is_whole = output.is_whole;
      all_.breaks_off = output.breaks_off;
      full_ = full_ || (!output.last && all_.bytes.size() > kMostBytes);
      wakes = !std::exchange(woken_, true);
    }
    if (wakes) wake_();
  }

  // What came since the last call; nothing: empty bytes that are not the last.
  Generation::Output take() {
    const std::lock_guard lock(mutex_);
    woken_ = false;
    return std::exchange(all_, {});
  }
  bool full() const {
    const std::lock_guard lock(mutex_);
    return full_;
  }

 private:
  const std::function<void()> wake_;
  mutable std::mutex mutex_;
  Generation::Output all_;
  bool woken_ = false, full_ = false;
};

}  // namespace tandem
