// A running generation request: submits its prompts to the engine and turns the results into JSON
// or server-sent events.
#pragma once
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "http/api_error.h"
#include "http/streamed_answer.h"
#include "scheduling/answer_stream.h"
#include "server/answer_json.h"
#include "server/metrics.h"
#include "server/reasoning.h"

namespace tandem {

class Generation : public StreamedAnswer, public std::enable_shared_from_this<Generation> {
 public:
  struct Setup {
    GenerationRequest request;
    AnswerInfo info;
    std::vector<std::vector<int32_t>> prompts;
    bool splits_reasoning = false;
    bool parses_tool_calls = false;                // look for tool calls in the text
    std::shared_ptr<const GrammarTokens> grammar;  // constrains the answers; null: none
    bool starts_in_reasoning = false;              // the grammar applies only after </think>
    Clock::time_point received;
  };
  // All references must outlive the generation.
  Generation(Setup setup, Engine& engine, const Tokenizer& tokenizer, Metrics& metrics,
             std::function<void(const std::string&)> log);

  // Submits all prompts to the engine. `send` is called from the engine's output thread until an
  // Output has `last`. Throws ApiError when the engine refuses a prompt or has failed.
  void start(Send send) override;
  // Aborts all answers; called when the client has disconnected.
  void cancel() override;

 private:
  struct Choice {
    explicit Choice(bool thinks) : reasoning(thinks) {}
    int prompt;
    ReasoningSplitter reasoning;
    ToolCallParser tools;
    ChoicePart all;  // the answer so far; texts only where they are needed at the end
    bool begun = false;
    int n_tokens = 0, cached_tokens = 0, n_calls = 0;
    int accepted_drafts = 0, rejected_drafts = 0;
    Clock::time_point started, first, last;
  };

  EngineRequest engine_request(int index);
  bool streams() const { return setup_.request.stream; }
  void on_part(int index, const AnswerPart& part);
  void process(Choice& choice, const AnswerPart& part);
  void record_metrics(Choice& choice, const AnswerPart& part);
  ChoicePart make_part(Choice& choice, const AnswerPart& part);
  void parse_tool_calls(Choice& choice, ChoicePart& piece) const;
  void stream_part(Choice& choice, const ChoicePart& piece);
  void accumulate(Choice& choice, ChoicePart piece);
  void send_events(std::string events);
  void fail(FinishReason reason, const ApiError& error);
  void finish();
  void log_finished(FinishReason reason);
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

  // Used by the engine's output thread only, after start().
  Send send_;
  std::vector<Choice> choices_;  // [prompts * n]
  int n_unfinished_ = 0;
  bool closed_ = false, sent_events_ = false;

  std::mutex mutex_;  // guards the members below
  std::vector<SequenceId> ids_;
  bool cancelled_ = false;
};

}  // namespace tandem
