// Splits an answer into reasoning, the text before </think>, and content, the text after it.
#pragma once
#include <string>
#include <string_view>

namespace tandem {

class ReasoningSplitter {
 public:
  struct Parts {
    std::string reasoning, content;
  };

  // `inside`: the prompt has already opened <think>, as R1's template does. Otherwise an answer has
  // reasoning only if it begins with <think>.
  explicit ReasoningSplitter(bool inside) : state_(inside ? State::kThinking : State::kBegin) {}

  // Splits the next piece of the text. Line breaks around </think> and at the beginning of the
  // reasoning belong to neither part.
  Parts push(std::string_view text);
  Parts flush();  // ends the text and returns what was held back

 private:
  enum class State { kBegin, kThinking, kAfter, kContent };
  void split_reasoning(Parts& parts);

  State state_;
  bool has_reasoning_ = false;  // some reasoning was returned
  std::string buffer_;
};

}  // namespace tandem
