#include "text/chat_roles.h"

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
// The text of a probe message. kProbeNote is a field of its part: if kProbeNote appears in the
// prompt, the template prints the list as a value instead of reading its parts.
constexpr const char* kProbeText = "tandem-probe-text";
constexpr const char* kProbeNote = "tandem-probe-note";

Json message(const std::string& role, Json content) {
  return {{"role", role}, {"content", std::move(content)}};
}

// The assistant's call of a tool.
Json tool_call(const Json& arguments) {
  Json call = message("assistant", nullptr);
  call["tool_calls"] = {{{"id", "functions.f:0"},
                         {"type", "function"},
                         {"function", {{"name", "f"}, {"arguments", arguments}}}}};
  return call;
}

// Conversations that contain a message of `role`. Templates may require the user first, system
// first, alternating turns, or a tool call before a tool's answer.
std::vector<Json> conversations(const std::string& role, const Json& content) {
  const Json user = message("user", "u"), probe = message(role, content);
  const Json calls = tool_call("{}");
  Json answer = probe;
  answer["tool_call_id"] = "functions.f:0";
  answer["name"] = "f";
  return {Json::array({probe}), Json::array({user, probe}), Json::array({probe, user}),
          Json::array({user, calls, answer}), Json::array({user, calls, answer, user})};
}

// Generous limits for rendering a small conversation.
constexpr jinja::Limits kLimits = {.steps = 100'000, .bytes = uint64_t{16} << 20};

// Whether kProbeText of one of these conversations appears in its prompt, and kProbeNote does not.
bool is_rendered(const jinja::Template& chat_template, const std::vector<Json>& conversations) {
  const Json constants = {{"documents", nullptr},
                          {"tools", nullptr},
                          {"add_generation_prompt", true},
                          {"bos_token", ""},
                          {"eos_token", ""}};
  for (const Json& messages : conversations) {
    try {
      const std::string text =
          chat_template.render({{"messages", messages}}, constants, kLimits).text;
      if (text.find(kProbeText) != text.npos && text.find(kProbeNote) == text.npos) return true;
    } catch (const Error&) {  // the template requires another order
    }
  }
  return false;
}

// A conversation in which the assistant calls a tool.
std::vector<Json> tool_call_conversations(const Json& arguments) {
  const Json user = message("user", "u"), calls = tool_call(arguments);
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

std::string join_parts(const Json& parts) {
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
    forms_[role] = probe_forms(chat_template, role);
    if (!forms_[role].any()) continue;
    shown_roles_ += shown_roles_.empty() ? "" : ", ";
    shown_roles_ += role;
  }
  forms_[""] = probe_forms(chat_template, kOtherRole);
  const Json arguments = {{"a", kProbeText}};
  arguments_ = {.texts = is_rendered(chat_template, tool_call_conversations(arguments.dump())),
                .lists = is_rendered(chat_template, tool_call_conversations(arguments))};
  for (const std::string& word : quoted_words(source)) {
    if (!forms_.contains(word)) forms_[word] = probe_forms(chat_template, word);
    handles_developer_ = handles_developer_ || (word == "developer" && forms_[word].any());
  }
}

Json ChatRoles::adapt(Json messages) const {
  if (shown_roles_.empty()) return messages;
  for (size_t i = 0; i < messages.size(); ++i) {
    Json& message = messages[i];
    auto& role = message["role"].get_ref<std::string&>();
    if (role == "developer" && !handles_developer_) role = "system";
    const Forms& forms = forms_of(role);
    require(forms.any(),
            "messages[{}]: the chat template of this model ignores the role {}; it reads {}", i,
            shown(role), shown_roles_);
    adapt_arguments(message);
    const auto content = message.find("content");
    if (content == message.end()) continue;
    if (content->is_array() && !forms.lists) *content = join_parts(*content);
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

ChatRoles::Forms ChatRoles::probe_forms(const jinja::Template& chat_template,
                                        const std::string& role) {
  const Json part = {{"type", "text"}, {"text", kProbeText}, {"note", kProbeNote}};
  return {.texts = is_rendered(chat_template, conversations(role, kProbeText)),
          .lists = is_rendered(chat_template, conversations(role, Json::array({part})))};
}

const ChatRoles::Forms& ChatRoles::forms_of(const std::string& role) const {
  const auto found = forms_.find(role);
  return found != forms_.end() ? found->second : forms_.at("");
}

}  // namespace tandem
