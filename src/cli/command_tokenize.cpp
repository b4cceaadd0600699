// tandem tokenize: text to ids and back.
#include <cstdio>
#include <nlohmann/json.hpp>

#include "cli/console.h"
#include "cli/conversation.h"
#include "cli/options.h"
#include "text/chat_format.h"

namespace tandem {
namespace {

std::vector<int32_t> ids_of_json(const std::string& text) {
  const auto ids = nlohmann::json::parse(text, nullptr, false);
  const bool good = ids.is_array() && std::all_of(ids.begin(), ids.end(), [](const auto& id) {
                      return id.is_number_integer() && id.template get<int64_t>() >= 0 &&
                             id.template get<int64_t>() <= INT32_MAX;
                    });
  require(good, "--decode wants a JSON array of token ids, such as [1, 2, 3]");
  return ids.get<std::vector<int32_t>>();
}

}  // namespace

int tokenize_command(const Options& options) {
  const GenerateOptions& g = options.generate;
  require(g.prompt.empty() || g.prompt_file.empty(), "both -p and -f were given: choose one");
  require(!options.decode || !options.chat, "both --decode and --chat were given: choose one");
  const std::string text = g.prompt_file.empty() ? g.prompt : read_text(g.prompt_file);
  const Tokenizer tokenizer = Tokenizer::from_directory(options.model.directory);
  if (options.decode) {
    std::puts(tokenizer.decode(ids_of_json(text)).c_str());
    return 0;
  }
  std::vector<int32_t> ids;
  if (options.chat) {
    const auto messages = nlohmann::ordered_json::parse(text, nullptr, false);
    require(messages.is_array(),
            "--chat wants a JSON list of messages, such as [{{\"role\": \"user\", \"content\": "
            "\"Hello\"}}]");
    ids = ChatFormat(options.model.directory, tokenizer).prompt(messages);
  } else {
    ids = tokenizer.encode(text);
  }
  std::puts(nlohmann::json(ids).dump().c_str());
  return 0;
}

}  // namespace tandem
