// A request for generated text under way: its prompts go to the engine, what comes back becomes
// JSON or server-sent events.
#pragma once
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/answer_stream.h"
#include "engine/engine.h"
#include "server/answer_format.h"
#include "server/api_error.h"
#include "server/metrics.h"
#include "server/reasoning.h"

namespace tandem {

class Generation : public std::enable_shared_from_this<Generation> {
 public:
  struct Setup {
    GenerationRequest request;
    AnswerHead head;
    std::vector<std::vector<int32_t>> prompts;
    bool splits_reasoning = false;
    bool finds_calls = false;                      // of tools
    std::shared_ptr<const GrammarTokens> grammar;  // of the answers; null: none
    bool thinks_first = false;                     // the grammar holds after the thinking
    Clock::time_point received;
  };
  // A part of the HTTP answer: the whole body, or some events of a stream. What fails before the
  // first event is a whole body that says so.
  struct Output {
    int status = 200;
    std::string bytes;
    bool last = false;
    bool is_whole = false;
    bool breaks_off = false;  // the last event is an error, and the connection ends behind it
  };
  using Send = std::function<void(Output)>;

  // References outlive the generation.
  Generation(Setup setup, Engine& engine, const Tokenizer& tokenizer, Metrics& metrics,
             std::function<void(const std::string&)> log);

  // Hands everything to the engine. `send` is called from the output thread until `last`. Throws
  // ApiError for what can never run.
  void start(Send send);
  // The client has gone.
  void cancel();

 private:
  struct Choice {
    explicit Choice(bool thinks) : reasoning(thinks) {}
    int prompt;
    ReasoningSplitter reasoning;
    ToolCallParser tools;
    ChoicePart all;  // so far; text only where it is needed at the end
    bool begun = false;
    int n_tokens = 0, cached_tokens = 0, n_calls = 0;
    Clock::time_point started, first, last;
  };

  EngineRequest engine_request(int index);
  bool streams() const { return setup_.request.stream; }
  void take(int index, const AnswerPart& part);
  void add(Choice& choice, const AnswerPart& part);
  void measure(Choice& choice, const AnswerPart& part);
  ChoicePart piece_of(Choice& choice, const AnswerPart& part);
  void find_calls(Choice& choice, ChoicePart& piece) const;
  void stream_piece(Choice& choice, const ChoicePart& piece);
  void collect(Choice& choice, ChoicePart piece);
  void send_events(std::string events);
  void fail(FinishReason reason, const ApiError& error);
  void end();
  void close(FinishReason reason);
  void add_reports(const Choice& choice, const TokenEvent& event, ChoicePart& piece) const;
  TokenReport report_of(int32_t token, std::optional<float> logprob,
                        const std::vector<TokenLogprob>& top, bool skips_special) const;
  TokenText token_text(int32_t token, std::optional<float> logprob) const;
  Usage usage() const;

  const Setup setup_;
  Engine& engine_;
  const Tokenizer& tokenizer_;
  Metrics& metrics_;
  const std::function<void(const std::string&)> log_;

  // The output thread's, once started.
  Send send_;
  std::vector<Choice> choices_;  // [prompts * n]
  int n_unfinished_ = 0;
  bool closed_ = false, sent_events_ = false;

  std::mutex mutex_;  // of what follows
  std::vector<SequenceId> ids_;
  bool cancelled_ = false;
};

}  // namespace tandem
