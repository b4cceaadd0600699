// From the tokens of one answer to its text as it becomes certain: complete characters, no part of
// a stop string.
#pragma once
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "engine/request.h"
#include "engine/stop_text.h"
#include "text/tokenizer.h"

namespace tandem {

// What the receiver of an answer is told, a call a token.
struct AnswerPart {
  std::string text;  // that became certain, often ""
  const TokenEvent* event;
  int n_tokens;                        // of the answer so far
  std::optional<FinishReason> finish;  // the last call
};

class AnswerStream {
 public:
  struct Options {
    std::vector<std::string> stops;
    bool skip_special = false;  // tokens such as the end of a sentence add no text
    bool include_stop = false;  // the stop string is part of the text
    int min_new_tokens = 0;     // stop strings are not looked for before
    std::function<void(const AnswerPart&)> on_part;
  };

  // The tokenizer outlives it.
  AnswerStream(const Tokenizer& tokenizer, Options options)
      : options_(std::move(options)),
        decoder_(tokenizer, options_.skip_special),
        stop_(options_.stops, options_.include_stop) {}

  // False: the answer has ended; later events are ignored. Made for EngineRequest::on_event.
  bool push(const TokenEvent& event);

 private:
  const Options options_;
  StreamDecoder decoder_;
  StopText stop_;
  int n_tokens_ = 0;
  bool ended_ = false;
};

}  // namespace tandem
