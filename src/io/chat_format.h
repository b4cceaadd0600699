// From a conversation or a raw text to the ids that a model reads, as its checkpoint wants it.
#pragma once
#include <filesystem>
#include <string>
#include <vector>

#include "io/chat_template.h"
#include "io/tokenizer.h"

namespace tandem {

// The chat template of a checkpoint: tokenizer_config.json's chat_template, or chat_template.jinja.
class ChatFormat {
 public:
  // Throws Error when the checkpoint has no template or one that cannot be read.
  ChatFormat(const std::string& directory, const Tokenizer& tokenizer);

  // Ids of a conversation up to the place where the model is to answer. Only what the template
  // itself writes becomes a control token: in whatever came with the messages, they stay text. The
  // options' BOS and EOS are the tokenizer's. Throws Error for what the template refuses.
  std::vector<int32_t> prompt(const nlohmann::ordered_json& messages,
                              ChatOptions options = {}) const;

 private:
  const Tokenizer& tokenizer_;
  const ChatTemplate template_;
};

// True when the prompt ends inside <think>: R1's template opens it.
bool opens_thinking(const Tokenizer& tokenizer, std::span<const int32_t> prompt);

// Ids of a raw text, with BOS where the tokenizer asks for it.
std::vector<int32_t> raw_prompt(const Tokenizer& tokenizer, std::string_view text);

}  // namespace tandem
