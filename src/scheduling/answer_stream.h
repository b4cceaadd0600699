// Turns the tokens of one answer into text: complete characters only, and no part of a stop string.
#pragma once
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "scheduling/request.h"
#include "scheduling/stop_text.h"
#include "text/tokenizer.h"

namespace tandem {

// New text and state of an answer, passed to its receiver with each token.
struct AnswerPart {
  std::string text;  // text that became final with this token, often ""
  const TokenEvent* event;
  int n_tokens;                        // tokens of the answer so far
  std::optional<FinishReason> finish;  // set in the last call only
};

class AnswerStream {
 public:
  struct Options {
    std::vector<std::string> stops;
    bool skip_special = false;  // tokens such as the end of a sentence add no text
    bool include_stop = false;  // the stop string is part of the text
    int min_new_tokens = 0;     // stop strings are ignored before this many tokens
    std::function<void(const AnswerPart&)> on_part;
  };

  // The tokenizer must outlive the object.
  AnswerStream(const Tokenizer& tokenizer, Options options)
      : options_(std::move(options)),
        decoder_(tokenizer, options_.skip_special),
        stop_(options_.stops, options_.include_stop) {}

  // Takes the next event; can be EngineRequest::on_event. Returns false once the answer has ended:
  // later events are ignored.
  bool push(const TokenEvent& event);

 private:
  const Options options_;
  StreamDecoder decoder_;
  StopText stop_;
  int n_tokens_ = 0;
  bool ended_ = false;
};

}  // namespace tandem
