// A conversation to the text that the model reads, with the chat template of its checkpoint.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "io/jinja/template.h"
#include "io/tokenizer.h"

namespace tandem {

// Immutable and thread-safe.
class ChatTemplate {
 public:
  // `source` is Jinja, as in tokenizer_config.json. Throws Error naming the line.
  explicit ChatTemplate(std::string_view source) : template_(source) {}

  // `context` is an object. Throws Error naming the line, also for what the template refuses.
  std::string render(const nlohmann::ordered_json& context) const {
    return template_.render(context);
  }

 private:
  jinja::Template template_;
};

struct ChatOptions {
  bool add_generation_prompt = true;
  nlohmann::ordered_json tools = nullptr;                           // null or an array
  nlohmann::ordered_json extra = nlohmann::ordered_json::object();  // {"thinking": true}, ..
  std::string bos_token, eos_token;
};

// `messages` is a list of objects with a role and a content: a text, null, absent, or a list of
// {"type": "text", "text": ..}. Throws Error naming the message that is not.
std::string render_chat(const ChatTemplate& chat_template, const nlohmann::ordered_json& messages,
                        const ChatOptions& options);

struct RenderedChat {
  std::string text;
  // Parts of `text` that came from contents of messages other than the assistant's; ascending,
  // disjoint. As EncodeOptions::literal they keep "<|end|>" typed by a user from being a token.
  // White space at the ends of a content is outside.
  std::vector<ByteRange> content_ranges;
  bool has_ranges = true;  // false: the template hides where contents went, so there are none
};

// Renders twice, with and without marks around contents, and trusts the marks only when they come
// back in pairs and the texts agree otherwise.
RenderedChat render_chat_with_ranges(const ChatTemplate& chat_template,
                                     const nlohmann::ordered_json& messages,
                                     const ChatOptions& options);

}  // namespace tandem
