// tandem logits: prints the model's logits, for comparison with other implementations.
#include <charconv>
#include <nlohmann/json.hpp>

#include "cli/console.h"
#include "cli/options.h"
#include "cli/ranks.h"
#include "engine/completion.h"
#include "io/npy.h"

namespace tandem {
namespace {

std::vector<int32_t> ids_of_file(const std::string& path) {
  const auto ids = nlohmann::json::parse(read_text(path), nullptr, false);
  const bool good = ids.is_array() && std::all_of(ids.begin(), ids.end(), [](const auto& id) {
                      return id.is_number_integer();
                    });
  require(good, "{} is not a JSON array of token ids, such as [1, 2, 3]", path);
  std::vector<int32_t> tokens;
  for (const auto& id : ids)
    tokens.push_back(static_cast<int32_t>(std::clamp<int64_t>(id.get<int64_t>(), -1, INT32_MAX)));
  return tokens;
}

std::vector<int32_t> parse_ids(const std::string& text) {
  if (text.starts_with("@")) return ids_of_file(text.substr(1));
  std::vector<int32_t> tokens;
  const char* at = text.data();
  const char* end = at + text.size();
  while (true) {
    int32_t id = 0;
    const auto [rest, error] = std::from_chars(at, end, id);
    require(error == std::errc() && (rest == end || *rest == ','),
            "--tokens {}: give ids separated by commas, such as 1,2,3", text);
    tokens.push_back(id);
    if (rest == end) return tokens;
    at = rest + 1;
  }
}

}  // namespace

int logits_command(const Options& options) {
  const std::vector<int32_t> tokens = parse_ids(options.text);
  const auto n = static_cast<int64_t>(tokens.size());
  ModelOptions model_options = options.model;
  if (model_options.context == 0) model_options.context = std::max<int64_t>(n, 1);
  require(n <= model_options.context, "{} tokens are more than --ctx {}: raise it", n,
          model_options.context);
  model_options.max_logits = options.all ? 64 : 1;

  if (model_options.ranks.follow()) return follow({model_options});
  LoadedModel loaded(model_options, load_progress(options.quiet));
  const int64_t vocab = loaded.config().vocab;
  NpyWriter file(options.out, options.all ? std::vector{n, vocab} : std::vector{vocab});
  Engine engine(loaded.model(), loaded.cache(), {loaded.config().vocab, {}}, loaded.context(),
                {.max_running = 1});
  score(engine, tokens, options.all ? 0 : n - 1,
        [&](int64_t, std::span<const float> logits) { file.write(logits); });
  file.close();
  if (options.json) {
    const nlohmann::ordered_json report = {
        {"out", options.out}, {"tokens", n}, {"vocab", vocab}, {"isa", loaded.isa()}};
    std::puts(report.dump().c_str());
  }
  return 0;
}

}  // namespace tandem
