#include "server/reasoning.h"

#include <utility>

#include "engine/stop_text.h"

namespace tandem {
namespace {

constexpr std::string_view kOpen = "<think>", kClose = "</think>";

}  // namespace

ReasoningSplitter::Parts ReasoningSplitter::push(std::string_view text) {
  Parts parts;
  held_ += text;
  if (state_ == State::kBegin) {
    if (held_.size() < kOpen.size() && kOpen.substr(0, held_.size()) == held_) return parts;
    const bool thinks = held_.compare(0, kOpen.size(), kOpen) == 0;
    if (thinks) held_.erase(0, kOpen.size());
    state_ = thinks ? State::kThinking : State::kContent;
  }
  if (state_ == State::kThinking) think(parts);
  if (state_ == State::kAfter) {
    held_.erase(0, held_.find_first_not_of('\n'));
    if (!held_.empty()) state_ = State::kContent;
  }
  if (state_ == State::kContent) parts.content = std::exchange(held_, {});
  return parts;
}

ReasoningSplitter::Parts ReasoningSplitter::flush() {
  std::string rest = std::exchange(held_, {});
  if (state_ == State::kThinking) return {.reasoning = std::move(rest), .content = {}};
  return {.reasoning = {}, .content = std::move(rest)};
}

void ReasoningSplitter::think(Parts& parts) {
  if (!begun_) held_.erase(0, held_.find_first_not_of('\n'));
  const size_t close = held_.find(kClose);
  size_t end =
      close != std::string::npos ? close : held_.size() - partial_mark_length(held_, kClose);
  while (end > 0 && held_[end - 1] == '\n') --end;
  parts.reasoning = held_.substr(0, end);
  begun_ = begun_ || end > 0;
  if (close == std::string::npos) {
    held_.erase(0, end);
  } else {
    held_.erase(0, close + kClose.size());
    state_ = State::kAfter;
  }
}

}  // namespace tandem
