// Carries the parts of answers from the engine's output thread to the thread that asked for them.
#pragma once
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "scheduling/answer_stream.h"

namespace tandem {

// What tandem_token has, as owned data.
struct AnswerItem {
  size_t index;  // of the request
  std::string text;
  std::optional<int32_t> token;
  float logprob;
  std::vector<TokenLogprob> top;
  int cached_tokens;
  std::optional<FinishReason> finish;
  std::string error;  // with FinishReason::kFailed
};

class AnswerQueue {
 public:
  void push(AnswerItem item) {
    const std::lock_guard lock(mutex_);
    items_.push_back(std::move(item));
    changed_.notify_one();
  }
  // Empty if nothing has come within `patience`.
  std::optional<AnswerItem> pop(std::chrono::milliseconds patience) {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, patience, [&] { return !items_.empty(); })) return {};
    AnswerItem item = std::move(items_.front());
    items_.pop_front();
    return item;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<AnswerItem> items_;
};

}  // namespace tandem
