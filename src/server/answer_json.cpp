#include "server/answer_json.h"

namespace tandem {
namespace {

OrderedJson info_json(const AnswerInfo& info, bool chunk) {
  const char* object = info.endpoint != Endpoint::kChat ? "text_completion"
                       : chunk                          ? "chat.completion.chunk"
                                                        : "chat.completion";
  return {{"id", info.id}, {"object", object}, {"created", info.created}, {"model", info.model}};
}

OrderedJson finish_json(const ChoicePart& part) {
  if (!part.finish) return nullptr;
  if (*part.finish == FinishReason::kStop && part.has_tool_calls) return "tool_calls";
  return finish_reason_name(*part.finish);
}

OrderedJson calls_json(const ChoicePart& part, bool with_index) {
  OrderedJson list = OrderedJson::array();
  int number = part.first_call;
  for (const ToolCall& call : part.calls) {
    OrderedJson json = OrderedJson::object();
    if (with_index) json["index"] = number++;
    json["id"] = call.id;
    json["type"] = "function";
    json["function"] = {{"name", call.name}, {"arguments", call.arguments}};
    list.push_back(std::move(json));
  }
  return list;
}

OrderedJson chat_token_json(const TokenText& token) {
  OrderedJson bytes = OrderedJson::array();
  for (const char byte : token.bytes) bytes.push_back(static_cast<unsigned char>(byte));
  return {{"token", token.text}, {"logprob", *token.logprob}, {"bytes", std::move(bytes)}};
}

OrderedJson chat_logprobs(const ChoicePart& part) {
  if (!part.wants_logprobs) return nullptr;
  OrderedJson content = OrderedJson::array();
  for (const TokenReport& report : part.tokens) {
    OrderedJson token = chat_token_json(report.chosen);
    OrderedJson top = OrderedJson::array();
    for (const TokenText& other : report.top) top.push_back(chat_token_json(other));
    token["top_logprobs"] = std::move(top);
    content.push_back(std::move(token));
  }
  return {{"content", std::move(content)}};
}

OrderedJson completion_logprobs(const ChoicePart& part) {
  if (!part.wants_logprobs) return nullptr;
  OrderedJson offsets = OrderedJson::array(), logprobs = offsets, tokens = offsets, tops = offsets;
  size_t offset = part.text_offset;
  for (const TokenReport& report : part.tokens) {
    offsets.push_back(offset);
    offset += report.n_shown;
    tokens.push_back(report.chosen.text);
    if (!report.chosen.logprob) {
      logprobs.push_back(nullptr);
      tops.push_back(nullptr);
      continue;
    }
    logprobs.push_back(*report.chosen.logprob);
    OrderedJson top = OrderedJson::object();
    for (const TokenText& other : report.top) top[other.text] = *other.logprob;
    top[report.chosen.text] = *report.chosen.logprob;
    tops.push_back(std::move(top));
  }
  return {{"text_offset", std::move(offsets)},
          {"token_logprobs", std::move(logprobs)},
          {"tokens", std::move(tokens)},
          {"top_logprobs", std::move(tops)}};
}

OrderedJson completion_choice(const ChoicePart& part) {
  return {{"index", part.index},
          {"text", part.text},
          {"logprobs", completion_logprobs(part)},
          {"finish_reason", finish_json(part)}};
}

// Under both names that clients read: DeepSeek's API and SGLang say reasoning_content, vLLM says
// reasoning.
void add_reasoning(OrderedJson& message, const ChoicePart& part) {
  if (part.reasoning.empty()) return;
  message["reasoning_content"] = part.reasoning;
  message["reasoning"] = part.reasoning;
}

OrderedJson chat_message(const ChoicePart& all) {
  OrderedJson message = {{"role", "assistant"}, {"content", all.text}};
  add_reasoning(message, all);
  if (all.calls.empty()) return message;
  if (all.text.empty()) message["content"] = nullptr;
  message["tool_calls"] = calls_json(all, false);
  return message;
}

OrderedJson chat_delta(const ChoicePart& part) {
  OrderedJson delta = OrderedJson::object();
  add_reasoning(delta, part);
  if (!part.text.empty()) delta["content"] = part.text;
  if (!part.calls.empty()) delta["tool_calls"] = calls_json(part, true);
  return delta;
}

OrderedJson chat_choice(const ChoicePart& part, const char* key, OrderedJson message) {
  return {{"index", part.index},
          {key, std::move(message)},
          {"logprobs", chat_logprobs(part)},
          {"finish_reason", finish_json(part)}};
}

}  // namespace

OrderedJson usage_json(const Usage& usage) {
  OrderedJson json = {{"prompt_tokens", usage.prompt_tokens},
                      {"completion_tokens", usage.completion_tokens},
                      {"total_tokens", usage.prompt_tokens + usage.completion_tokens},
                      {"prompt_tokens_details", {{"cached_tokens", usage.cached_tokens}}}};
  if (usage.accepted_drafts + usage.rejected_drafts > 0)
    json["completion_tokens_details"] = {{"accepted_prediction_tokens", usage.accepted_drafts},
                                         {"rejected_prediction_tokens", usage.rejected_drafts}};
  return json;
}

OrderedJson answer_json(const AnswerInfo& info, const std::vector<ChoicePart>& choices,
                        const Usage& usage) {
  OrderedJson list = OrderedJson::array();
  for (const ChoicePart& choice : choices)
    list.push_back(info.endpoint == Endpoint::kChat
                       ? chat_choice(choice, "message", chat_message(choice))
                       : completion_choice(choice));
  OrderedJson json = info_json(info, false);
  json["choices"] = std::move(list);
  json["usage"] = usage_json(usage);
  return json;
}

OrderedJson chunk_json(const AnswerInfo& info, const ChoicePart& part,
                       const std::optional<Usage>& usage) {
  OrderedJson json = info_json(info, true);
  json["choices"] = OrderedJson::array({info.endpoint == Endpoint::kChat
                                            ? chat_choice(part, "delta", chat_delta(part))
                                            : completion_choice(part)});
  if (usage) json["usage"] = usage_json(*usage);
  return json;
}

OrderedJson role_chunk_json(const AnswerInfo& info, int index) {
  ChoicePart part;
  part.index = index;
  OrderedJson json = info_json(info, true);
  json["choices"] =
      OrderedJson::array({chat_choice(part, "delta", {{"role", "assistant"}, {"content", ""}})});
  return json;
}

OrderedJson usage_chunk_json(const AnswerInfo& info, const Usage& usage) {
  OrderedJson json = info_json(info, true);
  json["choices"] = OrderedJson::array();
  json["usage"] = usage_json(usage);
  return json;
}

OrderedJson generate_json(const AnswerInfo& info, const ChoicePart& all, const Usage& usage) {
  OrderedJson finish;
  if (all.finish) {
    finish = {{"type", finish_reason_name(*all.finish)}};
    if (*all.finish == FinishReason::kLength) finish["length"] = usage.completion_tokens;
  }
  return {{"text", all.text},
          {"meta_info",
           {{"id", info.id},
            {"finish_reason", std::move(finish)},
            {"prompt_tokens", usage.prompt_tokens},
            {"completion_tokens", usage.completion_tokens},
            {"cached_tokens", usage.cached_tokens}}}};
}

OrderedJson models_json(const std::string& id, const std::string& root, int64_t context,
                        int64_t created, const std::string& role,
                        const std::string& simulated_routing) {
  OrderedJson model = {
      {"id", id},     {"object", "model"}, {"created", created},      {"owned_by", "tandem"},
      {"root", root}, {"parent", nullptr}, {"max_model_len", context}};
  if (!role.empty()) model["role"] = role;
  if (!simulated_routing.empty()) model["simulated_routing"] = simulated_routing;
  return {{"object", "list"}, {"data", OrderedJson::array({model})}};
}

const char* finish_reason_name(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kCancelled:
    case FinishReason::kDeadline:
    case FinishReason::kFailed:
      break;
  }
  return "abort";
}

std::string sse_event(const OrderedJson& data) { return "data: " + dump_json(data) + "\n\n"; }

std::string dump_json(const OrderedJson& json) {
  return json.dump(-1, ' ', false, OrderedJson::error_handler_t::replace);
}

}  // namespace tandem
