#include "text/chat_format.h"

#include "core/check.h"
#include "io/json.h"

namespace tandem {
namespace {

constexpr int64_t kMaxBytes = int64_t{64} << 20;

// chat_template.jinja, or else "chat_template" of tokenizer_config.json: one template, or a list of
// {name, template} from which "default" is taken.
std::string template_source(const std::string& directory) {
  const std::filesystem::path folder = directory;
  if (std::filesystem::exists(folder / "chat_template.jinja"))
    return read_text_file(folder / "chat_template.jinja", kMaxBytes);
  const std::filesystem::path file = folder / "tokenizer_config.json";
  require(std::filesystem::exists(file),
          "{} has no tokenizer_config.json with a chat template: use --raw for plain text",
          directory);
  const nlohmann::json config = parse_json(read_text_file(file, kMaxBytes), file.string());
  nlohmann::json chat_template = member(config, "chat_template");
  if (chat_template.is_array()) {
    for (const nlohmann::json& entry : config.at("chat_template"))
      if (member(entry, "name") == "default") chat_template = member(entry, "template");
  }
  require(chat_template.is_string(), "{} has no chat template: use --raw for plain text",
          file.string());
  return chat_template.get<std::string>();
}

}  // namespace

ChatFormat::ChatFormat(const std::string& directory, const Tokenizer& tokenizer)
    : tokenizer_(tokenizer), template_(template_source(directory)) {}

std::vector<int32_t> ChatFormat::prompt(const nlohmann::ordered_json& messages,
                                        ChatOptions options) const {
  options.bos_token = tokenizer_.config().bos_token.value_or("");
  options.eos_token = tokenizer_.config().eos_token.value_or("");
  const RenderedChat chat = render_chat(template_, messages, options);
  return tokenizer_.encode(chat.text, {.literal = chat.given});
}

bool opens_thinking(const Tokenizer& tokenizer, std::span<const int32_t> prompt) {
  const auto open = tokenizer.added_id("<think>"), close = tokenizer.added_id("</think>");
  if (!open) return false;
  for (size_t i = prompt.size(); i-- > 0;) {
    if (prompt[i] == *open) return true;
    if (close && prompt[i] == *close) return false;
  }
  return false;
}

std::vector<int32_t> raw_prompt(const Tokenizer& tokenizer, std::string_view text) {
  std::vector<int32_t> ids = tokenizer.encode(text);
  if (tokenizer.add_bos() && tokenizer.bos()) ids.insert(ids.begin(), *tokenizer.bos());
  return ids;
}

}  // namespace tandem
