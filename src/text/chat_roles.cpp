#include "text/chat_roles.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <set>

#include "core/check.h"
#include "io/json.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::array<const char*, 4> kRoles = {"system", "user", "assistant", "tool"};
// A role that no template mentions.
constexpr const char* kOtherRole = "tandem-other-role";
// The text of a probe message. kNote is a field of its part: if kNote appears in the prompt, the
// template prints the list as a value instead of reading its parts.
constexpr const char* kText = "tandem-probe-text";
constexpr const char* kNote = "tandem-probe-note";

Json message(const std::string& role, Json content) {
  return {{"role", role}, {"content", std::move(content)}};
}

// Conversations that contain a message of `role`. Templates may require the user first, system
// first, alternating turns, or a tool call before a tool's answer.
std::vector<Json> conversations(const std::string& role, const Json& content) {
  const Json user = message("user", "u"), probe = message(role, content);
  Json calls = message("assistant", nullptr);
  calls["tool_calls"] = {{{"id", "functions.f:0"},
                          {"type", "function"},
                          {"function", {{"name", "f"}, {"arguments", "{}"}}}}};
  Json answer = probe;
  answer["tool_call_id"] = "functions.f:0";
  answer["name"] = "f";
  return {Json::array({probe}), Json::array({user, probe}), Json::array({probe, user}),
          Json::array({user, calls, answer}), Json::array({user, calls, answer, user})};
}

// Generous limits for rendering a small conversation.
constexpr jinja::Limits kLimits = {.steps = 100'000, .bytes = uint64_t{16} << 20};

// Whether kText of one of these conversations appears in its prompt, and kNote does not.
bool arrives(const jinja::Template& chat_template, const std::vector<Json>& conversations) {
  const Json constants = {{"documents", nullptr},
                          {"tools", nullptr},
                          {"add_generation_prompt", true},
                          {"bos_token", ""},
                          {"eos_token", ""}};
  for (const Json& messages : conversations) {
    try {
      const std::string text =
          chat_template.render({{"messages", messages}}, constants, kLimits).text;
      if (text.find(kText) != text.npos && text.find(kNote) == text.npos) return true;
    } catch (const Error&) {  // the template requires another order
    }
  }
  return false;
}

// A conversation in which the assistant calls a tool.
std::vector<Json> call_with(const Json& arguments) {
  Json calls = message("assistant", nullptr);
  calls["tool_calls"] = {{{"id", "functions.f:0"},
                          {"type", "function"},
                          {"function", {{"name", "f"}, {"arguments", arguments}}}}};
  const Json user = message("user", "u");
  return {Json::array({user, calls}), Json::array({user, calls, message("tool", "t"), user})};
}

// String literals in a template's source that may be names of roles.
std::set<std::string> quoted_words(std::string_view source) {
  constexpr size_t kMaxWords = 64, kMaxWordLength = 32;
  const auto is_letter = [](char c) { return (c >= 'a' && c <= 'z') || c == '_' || c == '-'; };
  std::set<std::string> words;
  for (const char quote : {'\'', '"'})
    for (size_t at = source.find(quote); at != source.npos && words.size() < kMaxWords;) {
      const size_t end = std::min(source.find(quote, at + 1), source.size());
      const std::string_view word = source.substr(at + 1, end - at - 1);
      if (!word.empty() && word.size() <= kMaxWordLength &&
          std::all_of(word.begin(), word.end(), is_letter))
        words.emplace(word);
      at = source.find(quote, end);
    }
  return words;
}

std::string joined(const Json& parts) {
  std::string text;
  for (const Json& part : parts) {
    if (&part != &parts.front()) text += '\n';
    text += part["text"].get_ref<const std::string&>();
  }
  return text;
}

}  // namespace

ChatRoles::ChatRoles(const jinja::Template& chat_template, std::string_view source) {
  for (const char* role : kRoles) {
    readings_[role] = reading_of(chat_template, role);
    if (!readings_[role].any()) continue;
    shown_roles_ += shown_roles_.empty() ? "" : ", ";
    shown_roles_ += role;
  }
  readings_[""] = reading_of(chat_template, kOtherRole);
  const Json arguments = {{"a", kText}};
  arguments_ = {.texts = arrives(chat_template, call_with(arguments.dump())),
                .lists = arrives(chat_template, call_with(arguments))};
  for (const std::string& word : quoted_words(source)) {
    if (!readings_.contains(word)) readings_[word] = reading_of(chat_template, word);
    names_developer_ = names_developer_ || (word == "developer" && readings_[word].any());
  }
}

Json ChatRoles::adapted(Json messages) const {
  if (shown_roles_.empty()) return messages;
  for (size_t i = 0; i < messages.size(); ++i) {
    Json& message = messages[i];
    auto& role = message["role"].get_ref<std::string&>();
    if (role == "developer" && !names_developer_) role = "system";
    const Reading& forms = reading(role);
    require(forms.any(),
            "messages[{}]: the chat template of this model ignores the role {}; it reads {}", i,
            shown(role), shown_roles_);
    adapt_arguments(message);
    const auto content = message.find("content");
    if (content == message.end()) continue;
    if (content->is_array() && !forms.lists) *content = joined(*content);
    if (content->is_string() && !forms.texts)
      *content = Json::array({{{"type", "text"}, {"text", *content}}});
  }
  return messages;
}

// A template that reads neither form is left to say so.
void ChatRoles::adapt_arguments(Json& message) const {
  const auto calls = message.find("tool_calls");
  if (calls == message.end() || !calls->is_array() || arguments_.texts == arguments_.lists) return;
  for (Json& call : *calls) {
    if (!call.is_object() || !call.contains(nlohmann::json::json_pointer("/function/arguments")))
      continue;
    Json& arguments = call["function"]["arguments"];
    if (arguments.is_object() && arguments_.texts) arguments = arguments.dump();
    if (!arguments.is_string() || !arguments_.lists) continue;
    Json read = Json::parse(arguments.get_ref<const std::string&>(), nullptr, false);
    if (read.is_object()) arguments = std::move(read);
  }
}

ChatRoles::Reading ChatRoles::reading_of(const jinja::Template& chat_template,
                                         const std::string& role) {
  const Json part = {{"type", "text"}, {"text", kText}, {"note", kNote}};
  return {.texts = arrives(chat_template, conversations(role, kText)),
          .lists = arrives(chat_template, conversations(role, Json::array({part})))};
}

const ChatRoles::Reading& ChatRoles::reading(const std::string& role) const {
  const auto found = readings_.find(role);
  return found != readings_.end() ? found->second : readings_.at("");
}

}  // namespace tandem
