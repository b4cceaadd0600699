// Turns a conversation or a raw text into the token ids of a prompt, in the format of the model's
// checkpoint.
#pragma once
#include <string>
#include <vector>

#include "text/chat_template.h"
#include "text/tokenizer.h"

namespace tandem {

// The chat template of a checkpoint: tokenizer_config.json's chat_template, or chat_template.jinja.
class ChatFormat {
 public:
  // Throws Error when the checkpoint has no template or one that cannot be read.
  ChatFormat(const std::string& directory, const Tokenizer& tokenizer);

  // Token ids of a conversation up to the point where the model answers. Only text of the template
  // itself is recognised as added tokens; the same strings inside messages stay plain text. BOS and
  // EOS in `options` are overwritten by the tokenizer's. Throws Error when the template refuses the
  // messages.
  std::vector<int32_t> prompt(const nlohmann::ordered_json& messages,
                              ChatOptions options = {}) const;

 private:
  const Tokenizer& tokenizer_;
  const ChatTemplate template_;
};

// True when the prompt ends inside an open <think>, as R1's template does.
bool opens_thinking(const Tokenizer& tokenizer, std::span<const int32_t> prompt);

// Token ids of a raw text, with BOS if the tokenizer adds it.
std::vector<int32_t> raw_prompt(const Tokenizer& tokenizer, std::string_view text);

}  // namespace tandem
