// What the server answers, as JSON: OpenAI's objects and SGLang's. Pure functions.
#pragma once
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "engine/request.h"
#include "io/tokenizer.h"
#include "server/generation_request.h"
#include "server/tool_calls.h"

namespace tandem {

using OrderedJson = nlohmann::ordered_json;

// The same in all objects of one answer.
struct AnswerHead {
  Endpoint endpoint;
  std::string id, model;
  int64_t created;  // seconds since 1970
};

struct Usage {
  int prompt_tokens = 0, completion_tokens = 0, cached_tokens = 0;
};

struct TokenText {
  std::string text, bytes;
  std::optional<float> logprob;  // none: nothing came before it
};
struct TokenReport {  // a token of an answer that asked for log-probabilities
  TokenText chosen;
  std::vector<TokenText> top;
  size_t n_shown = 0;  // characters that it adds to the text; special tokens may add none
};

// One answer, or what is new of it in a chunk.
struct ChoicePart {
  int index = 0;
  std::string text;       // completions: the text; chat: the content
  std::string reasoning;  // chat
  std::vector<ToolCall> calls;
  int first_call = 0;   // number of the first of `calls` in its answer
  bool called = false;  // the answer has calls, here or before
  std::vector<TokenReport> tokens;
  size_t text_offset = 0;  // of the first of `tokens`, for completions
  bool wants_logprobs = false;
  std::optional<FinishReason> finish;
};

OrderedJson usage_json(const Usage& usage);

// A whole answer of /v1/completions or /v1/chat/completions.
OrderedJson answer_json(const AnswerHead& head, const std::vector<ChoicePart>& choices,
                        const Usage& usage);
// A chunk of a stream.
OrderedJson chunk_json(const AnswerHead& head, const ChoicePart& part,
                       const std::optional<Usage>& usage);
// The first of a chat's stream.
OrderedJson role_chunk_json(const AnswerHead& head, int index);
// The last when usage was asked for: no choices.
OrderedJson usage_chunk_json(const AnswerHead& head, const Usage& usage);

// SGLang's object: all text so far.
OrderedJson generate_json(const AnswerHead& head, const ChoicePart& all, const Usage& usage);

OrderedJson models_json(const std::string& id, const std::string& root, int64_t context,
                        int64_t created);

// "stop", "length" or "abort".
const char* finish_name(FinishReason reason);

size_t n_characters(std::string_view text);  // of UTF-8

// A server-sent event.
std::string event_of(const OrderedJson& data);
inline constexpr std::string_view kDoneEvent = "data: [DONE]\n\n";
// JSON as text; what is not UTF-8 in it is replaced.
std::string dumped(const OrderedJson& json);

}  // namespace tandem
