#include "scheduling/answer_stream.h"

namespace tandem {

bool AnswerStream::push(const TokenEvent& event) {
  if (ended_) return false;
  AnswerPart part{.text = {}, .event = &event, .n_tokens = n_tokens_, .finish = event.finish};
  if (event.token) {
    part.n_tokens = ++n_tokens_;
    std::string text = decoder_.push(*event.token);
    part.text = n_tokens_ > options_.min_new_tokens ? stop_.push(text) : std::move(text);
    if (stop_.stopped()) part.finish = FinishReason::kStop;
  }
  if (part.finish && !stop_.stopped()) {
    part.text += stop_.push(decoder_.flush());
    part.text += stop_.flush();
  }
  ended_ = part.finish.has_value();
  options_.on_part(part);
  return !ended_;
}

}  // namespace tandem
