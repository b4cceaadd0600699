// Passes the bytes of an answer from the engine's output thread to the I/O thread.
#pragma once
#include <functional>
#include <mutex>

#include "http/streamed_answer.h"

namespace tandem {

class Outbox {
 public:
  // `wake` is called on the output thread by the first push(), and by the first after each take().
  explicit Outbox(std::function<void()> wake) : wake_(std::move(wake)) {}

  // A client that leaves more bytes than this unread is treated as disconnected.
  static constexpr size_t kMaxBytes = size_t{4} << 20;

  void push(const StreamedAnswer::Output& output) {
    bool wakes = false;
    {
      const std::lock_guard lock(mutex_);
      pending_.bytes += output.bytes;
      pending_.status = output.status;
      pending_.last = output.last;
      pending_.is_complete_body = output.is_complete_body;
      pending_.aborts_stream = output.aborts_stream;
      full_ = full_ || (!output.last && pending_.bytes.size() > kMaxBytes);
      wakes = !std::exchange(woken_, true);
    }
    if (wakes) wake_();
  }

  // Returns everything pushed since the last call; if there is nothing, `bytes` is empty and `last`
  // is false.
  StreamedAnswer::Output take() {
    const std::lock_guard lock(mutex_);
    woken_ = false;
    return std::exchange(pending_, {});
  }
  bool full() const {
    const std::lock_guard lock(mutex_);
    return full_;
  }

 private:
  const std::function<void()> wake_;
  mutable std::mutex mutex_;
  StreamedAnswer::Output pending_;
  bool woken_ = false, full_ = false;
};

}  // namespace tandem
