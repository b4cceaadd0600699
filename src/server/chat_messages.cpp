#include "server/chat_messages.h"

#include <fmt/format.h>

#include "http/api_error.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kMaxMessages = 16'384;

Json text_part(std::string text) { return {{"type", "text"}, {"text", std::move(text)}}; }

Json read_part(const RequestFields& part, bool is_assistant) {
  const std::string type = part.string("type", "");
  const bool is_refusal = type == "refusal" && is_assistant;
  if (type != "text" && !is_refusal) part.refuse("type", "\"text\": this model reads text only");
  if (!part.find(type)) part.refuse(type, "a string");
  return text_part(part.string(type, ""));
}

// Returns the content: a string, a list of parts, or null.
Json read_content(const RequestFields& message, const std::string& path, bool is_assistant) {
  const Json* content = message.find("content");
  if (!content) return nullptr;
  if (content->is_string()) return *content;
  if (!content->is_array() || content->empty())
    message.refuse("content", "a string or a list of at least one part");
  Json parts = Json::array();
  for (size_t i = 0; i < content->size(); ++i)
    parts.push_back(read_part(RequestFields((*content)[i], fmt::format("{}content[{}].", path, i)),
                              is_assistant));
  return parts;
}

void add_refusal(Json& content, std::string refusal) {
  if (refusal.empty()) return;
  if (content.is_array()) return content.push_back(text_part(std::move(refusal)));
  if (content.is_string() && !content.get_ref<const std::string&>().empty())
    refusal = content.get<std::string>() + "\n" + refusal;
  content = std::move(refusal);
}

Json read_call(const RequestFields& call, const Json& given) {
  call.string("id", "");
  if (call.string("type", "function") != "function") call.refuse("type", "\"function\"");
  const RequestFields function = call.object("function");
  if (function.string("name", "").empty()) function.refuse("name", "the function's name");
  const Json* arguments = function.find("arguments");
  if (!arguments || !(arguments->is_string() || arguments->is_object()))
    function.refuse("arguments", "an object, or a string with the JSON of one");
  Json read = given;
  read["type"] = "function";
  return read;
}

// An empty list counts as absent; otherwise a template would write the marks of calls without any.
Json read_calls(const RequestFields& message, const std::string& path) {
  Json read = Json::array();
  const Json* calls = message.find("tool_calls");
  if (!calls) return read;
  if (!calls->is_array()) message.refuse("tool_calls", "a list of calls");
  for (size_t i = 0; i < calls->size(); ++i)
    read.push_back(read_call(RequestFields((*calls)[i], fmt::format("{}tool_calls[{}].", path, i)),
                             (*calls)[i]));
  return read;
}

bool is_empty_text(const Json& content) {
  return content.is_string() && content.get_ref<const std::string&>().empty();
}

Json read_message(const Json& given, const std::string& path) {
  const RequestFields message(given, path);
  const std::string role = message.string("role", "");
  if (role.empty()) message.refuse("role", "system, developer, user, assistant or tool");
  const bool is_assistant = role == "assistant";
  for (const char* key : {"name", "tool_call_id", "refusal", "reasoning_content", "reasoning"})
    message.string(key, "");
  if (message.find("audio")) message.refuse("audio", "absent: this model reads text only");
  if (message.find("function_call")) message.refuse("function_call", "absent: use tool_calls");

  Json calls = read_calls(message, path);
  if (!calls.empty() && !is_assistant)
    message.refuse("tool_calls", "absent: only an assistant calls tools");
  Json content = read_content(message, path, is_assistant);
  if (is_assistant) add_refusal(content, message.string("refusal", ""));
  // The published templates of V3 and R1 write calls only if the content is null.
  if (!calls.empty() && is_empty_text(content)) content = nullptr;
  if (content.is_null() && calls.empty()) {
    // Only an answer that was truncated inside its reasoning has no content.
    if (!(is_assistant && (message.find("reasoning_content") || message.find("reasoning"))))
      message.refuse("content", "a string or a list of parts");
    content = "";
  }

  Json read = Json::object();
  for (const auto& [key, value] : given.items())
    if (!value.is_null() && key != "tool_calls" && key != "refusal") read[key] = value;
  // Templates read the first name; vLLM's answers have the second.
  if (!read.contains("reasoning_content") && read.contains("reasoning"))
    read["reasoning_content"] = message.string("reasoning", "");
  read["content"] = std::move(content);
  if (!calls.empty()) read["tool_calls"] = std::move(calls);
  return read;
}

}  // namespace

Json read_chat_messages(const RequestFields& request) {
  const Json* messages = request.find("messages");
  if (!messages || !messages->is_array() || messages->empty())
    request.refuse("messages", "a list of at least one message");
  if (messages->size() > kMaxMessages)
    throw ApiError(
        400,
        fmt::format("messages has {} entries: must be at most {}", messages->size(), kMaxMessages),
        "messages");
  Json read = Json::array();
  for (size_t i = 0; i < messages->size(); ++i)
    read.push_back(read_message((*messages)[i], fmt::format("messages[{}].", i)));
  return read;
}

}  // namespace tandem
