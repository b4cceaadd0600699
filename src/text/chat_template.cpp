#include "text/chat_template.h"

#include "core/check.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

void check_content(const Json& content, size_t index) {
  if (content.is_null() || content.is_string()) return;
  require(content.is_array(), "message {}: the content must be a string, null or a list of parts",
          index);
  for (const Json& part : content)
    require(part.is_object() && part.contains("type") && part["type"] == "text" &&
                part.contains("text") && part["text"].is_string(),
            "message {}: a part of the content must be {{\"type\": \"text\", \"text\": ..}}; "
            "other types are not supported",
            index);
}

void check_messages(const Json& messages) {
  require(messages.is_array(), "messages must be a list of objects with a role and a content");
  for (size_t i = 0; i < messages.size(); ++i) {
    const Json& message = messages[i];
    require(message.is_object() && message.contains("role") && message["role"].is_string(),
            "message {} must be an object with a role such as \"user\"", i);
    if (message.contains("content")) check_content(message["content"], i);
  }
}

}  // namespace

RenderedChat render_chat(const ChatTemplate& chat_template, const Json& messages,
                         const ChatOptions& options) {
  check_messages(messages);
  require(options.tools.is_null() || options.tools.is_array(), "tools must be a list");
  require(options.extra.is_object(), "arguments for the chat template must be an object");
  const Json constants = {{"documents", nullptr},
                          {"add_generation_prompt", options.add_generation_prompt},
                          {"bos_token", options.bos_token},
                          {"eos_token", options.eos_token}};
  Json context = {{"messages", chat_template.roles().adapt(messages)}, {"tools", options.tools}};
  for (const auto& [name, value] : options.extra.items()) context[name] = value;
  jinja::Template::Text text = chat_template.jinja().render(context, constants);
  return {std::move(text.text), std::move(text.given)};
}

}  // namespace tandem
