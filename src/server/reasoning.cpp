#include "server/reasoning.h"

#include <utility>

#include "scheduling/stop_text.h"

namespace tandem {
namespace {

constexpr std::string_view kOpen = "<think>", kClose = "</think>";

}  // namespace

ReasoningSplitter::Parts ReasoningSplitter::push(std::string_view text) {
  Parts parts;
  buffer_ += text;
  if (state_ == State::kBegin) {
    if (buffer_.size() < kOpen.size() && kOpen.substr(0, buffer_.size()) == buffer_) return parts;
    const bool thinks = buffer_.compare(0, kOpen.size(), kOpen) == 0;
    if (thinks) buffer_.erase(0, kOpen.size());
    state_ = thinks ? State::kThinking : State::kContent;
  }
  if (state_ == State::kThinking) split_reasoning(parts);
  if (state_ == State::kAfter) {
    buffer_.erase(0, buffer_.find_first_not_of('\n'));
    if (!buffer_.empty()) state_ = State::kContent;
  }
  if (state_ == State::kContent) parts.content = std::exchange(buffer_, {});
  return parts;
}

ReasoningSplitter::Parts ReasoningSplitter::flush() {
  std::string rest = std::exchange(buffer_, {});
  if (state_ == State::kThinking) return {.reasoning = std::move(rest), .content = {}};
  return {.reasoning = {}, .content = std::move(rest)};
}

void ReasoningSplitter::split_reasoning(Parts& parts) {
  if (!has_reasoning_) buffer_.erase(0, buffer_.find_first_not_of('\n'));
  const size_t close = buffer_.find(kClose);
  const size_t thought =
      close != std::string::npos ? close : buffer_.size() - partial_match_length(buffer_, kClose);
  // Newlines at the end are held back; npos + 1 is 0.
  const size_t end = std::string_view(buffer_).substr(0, thought).find_last_not_of('\n') + 1;
  parts.reasoning = buffer_.substr(0, end);
  has_reasoning_ = has_reasoning_ || end > 0;
  if (close == std::string::npos) {
    buffer_.erase(0, end);
  } else {
    buffer_.erase(0, close + kClose.size());
    state_ = State::kAfter;
  }
}

}  // namespace tandem
