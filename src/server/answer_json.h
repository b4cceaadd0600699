// Builds the JSON of the server's answers: objects of OpenAI's API and SGLang's. Pure functions.
#pragma once
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "scheduling/request.h"
#include "server/generation_request.h"
#include "server/tool_calls.h"
#include "text/tokenizer.h"

namespace tandem {

using OrderedJson = nlohmann::ordered_json;

// Fields that are the same in all objects of one answer.
struct AnswerInfo {
  Endpoint endpoint;
  std::string id, model;
  int64_t created;  // seconds since 1970
};

struct Usage {
  int prompt_tokens = 0, completion_tokens = 0, cached_tokens = 0;
  int accepted_drafts = 0, rejected_drafts = 0;
};

struct TokenText {
  std::string text, bytes;
  std::optional<float> logprob;  // nullopt for the first token of a prompt
};
struct TokenReport {  // the log-probabilities of one token
  TokenText chosen;
  std::vector<TokenText> top;
  size_t n_shown = 0;  // number of characters it adds to the text; 0 for hidden special tokens
};

// One whole answer, or the part of it that is sent in a chunk.
struct ChoicePart {
  int index = 0;
  std::string text;       // completions: the text; chat: the content
  std::string reasoning;  // chat
  std::vector<ToolCall> calls;
  int first_call = 0;           // index of the first of `calls` among all calls of the answer
  bool has_tool_calls = false;  // the answer has calls, in this part or an earlier one
  std::vector<TokenReport> tokens;
  size_t text_offset = 0;  // character offset of the first of `tokens`, for completions
  bool wants_logprobs = false;
  std::optional<FinishReason> finish;
};

OrderedJson usage_json(const Usage& usage);

// A whole answer of /v1/completions or /v1/chat/completions.
OrderedJson answer_json(const AnswerInfo& info, const std::vector<ChoicePart>& choices,
                        const Usage& usage);
// A chunk of a stream.
OrderedJson chunk_json(const AnswerInfo& info, const ChoicePart& part,
                       const std::optional<Usage>& usage);
// The first chunk of each answer of a chat.
OrderedJson role_chunk_json(const AnswerInfo& info, int index);
// The last chunk if usage was requested; it has no choices.
OrderedJson usage_chunk_json(const AnswerInfo& info, const Usage& usage);

// SGLang's object, with all text so far.
OrderedJson generate_json(const AnswerInfo& info, const ChoicePart& all, const Usage& usage);

// `role`, for routers, and `simulated_routing`, for clients that measure, are named unless they are
// empty.
OrderedJson models_json(const std::string& id, const std::string& root, int64_t context,
                        int64_t created, const std::string& role,
                        const std::string& simulated_routing);

// "stop", "length" or "abort".
const char* finish_reason_name(FinishReason reason);

// The text of a server-sent event.
std::string sse_event(const OrderedJson& data);
inline constexpr std::string_view kDoneEvent = "data: [DONE]\n\n";
// JSON as text; ill-formed UTF-8 is replaced by U+FFFD.
std::string dump_json(const OrderedJson& json);

}  // namespace tandem
