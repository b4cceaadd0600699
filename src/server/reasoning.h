// Thinking apart from the answer: what stands before </think> is reasoning, the rest is content.
#pragma once
#include <string>
#include <string_view>

namespace tandem {

class ReasoningSplitter {
 public:
  struct Parts {
    std::string reasoning, content;
  };

  // `inside`: the prompt opened <think> already, as R1's template does. Otherwise an answer thinks
  // only if it begins with <think>.
  explicit ReasoningSplitter(bool inside) : state_(inside ? State::kThinking : State::kBegin) {}

  // Of a text that arrives in pieces. New lines around </think> and at the ends belong to neither.
  Parts push(std::string_view text);
  Parts flush();  // what was held back, when the text ends

 private:
  enum class State { kBegin, kThinking, kAfter, kContent };
  void think(Parts& parts);

  State state_;
  bool begun_ = false;  // some reasoning was given out
  std::string held_;
};

}  // namespace tandem
