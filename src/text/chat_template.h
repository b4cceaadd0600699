// Renders a conversation as the model's input text with the chat template of its checkpoint.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "text/chat_roles.h"
#include "text/jinja/template.h"

namespace tandem {

// Immutable and thread-safe.
class ChatTemplate {
 public:
  // `source` is Jinja, as in tokenizer_config.json. Throws Error naming the line.
  explicit ChatTemplate(std::string_view source) : template_(source), roles_(template_, source) {}

  const jinja::Template& jinja() const { return template_; }
  const ChatRoles& roles() const { return roles_; }

 private:
  jinja::Template template_;
  ChatRoles roles_;
};

struct ChatOptions {
  bool add_generation_prompt = true;
  nlohmann::ordered_json tools = nullptr;                           // null or an array
  nlohmann::ordered_json extra = nlohmann::ordered_json::object();  // {"thinking": true}, ..
  std::string bos_token, eos_token;
};

struct RenderedChat {
  std::string text;
  // Ranges of `text` that came from messages, tools and `extra` (contents, names, roles, calls),
  // even if the template transformed them. Ascending, disjoint. Passed as EncodeOptions::literal,
  // they keep user text such as "<|end|>" from becoming a token.
  std::vector<ByteRange> given;
};

// `messages` is a list of objects with a role and a content: a text, null, absent, or a list of
// {"type": "text", "text": ..}. They are adapted to the template first (ChatRoles). Throws Error
// naming a message of another form, and when the template refuses the messages.
RenderedChat render_chat(const ChatTemplate& chat_template, const nlohmann::ordered_json& messages,
                         const ChatOptions& options);

}  // namespace tandem
