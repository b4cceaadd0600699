#include "bench/serving/dataset.h"

#include <algorithm>
#include <filesystem>

#include "core/check.h"
#include "io/json.h"

namespace tandem {
namespace {

constexpr std::string_view kAssistant = "Assistant:";
constexpr int64_t kMaxTokenizerBytes = 256 << 20;

using Turns = std::pair<std::string, std::string>;

std::vector<Turns> shuffled_turns(const DatasetOptions& o, PythonRandom& python) {
  require(!o.path.empty(),
          "--dataset-name {}: give --dataset-path, a ShareGPT file such as "
          "ShareGPT_V3_unfiltered_cleaned_split.json; --dataset-name random-ids needs none",
          o.name);
  std::vector<Turns> turns = read_sharegpt(o.path);
  require(!turns.empty(), "{}: has no conversation of two turns", o.path);
  python.shuffle(turns);
  return turns;
}

std::string with_suffix(std::string prompt, const std::string& suffix) {
  if (suffix.empty()) return prompt;
  if (prompt.ends_with(kAssistant)) prompt.resize(prompt.size() - kAssistant.size());
  return prompt + suffix + std::string(kAssistant);
}

std::vector<ServingRequest> sharegpt(const DatasetOptions& o, const Tokenizer& tokenizer,
                                     PythonRandom& python) {
  std::vector<ServingRequest> requests;
  for (auto& [first, second] : shuffled_turns(o, python)) {
    if (requests.size() == static_cast<size_t>(o.n_prompts)) break;
    std::string prompt = with_suffix(std::move(first), o.prompt_suffix);
    const auto n_prompt = static_cast<int>(tokenizer.encode(prompt).size());
    const int n_output = o.sharegpt_output_tokens
                             ? *o.sharegpt_output_tokens
                             : static_cast<int>(tokenizer.encode(second).size());
    if (n_prompt < 2 || n_output < 2) continue;
    if (o.sharegpt_context && n_prompt + n_output > *o.sharegpt_context) continue;
    requests.push_back({std::move(prompt), {}, n_prompt, n_output});
  }
  return requests;
}

ServingRequest request_of(std::vector<int32_t> ids, int n_output, const DatasetOptions& o,
                          const Tokenizer& tokenizer) {
  const auto n_prompt = static_cast<int>(ids.size());
  if (o.sends_ids) return {"", std::move(ids), n_prompt, n_output};
  std::erase_if(ids, [&](int32_t id) { return !tokenizer.has_token(id); });
  return {tokenizer.decode(ids), {}, n_prompt, n_output};
}

// Prompts of the file, cut or repeated to the drawn lengths.
std::vector<ServingRequest> random_texts(const DatasetOptions& o, const Tokenizer& tokenizer,
                                         PythonRandom& python, const std::vector<int>& inputs,
                                         const std::vector<int>& outputs) {
  std::vector<ServingRequest> requests;
  for (const auto& [first, second] : shuffled_turns(o, python)) {
    const size_t i = requests.size();
    if (i == inputs.size()) break;
    const std::vector<int32_t> once = tokenizer.encode(first);
    if (once.empty()) continue;
    std::vector<int32_t> ids(static_cast<size_t>(inputs[i]));
    for (size_t j = 0; j < ids.size(); ++j) ids[j] = once[j % once.size()];
    requests.push_back(request_of(std::move(ids), outputs[i], o, tokenizer));
  }
  return requests;
}

std::vector<ServingRequest> random_ids(const DatasetOptions& o, const Tokenizer& tokenizer,
                                       int n_base_tokens, NumpyRandom& numpy,
                                       const std::vector<int>& inputs,
                                       const std::vector<int>& outputs) {
  const std::vector<int> offsets = numpy.integers(0, n_base_tokens, o.n_prompts);
  std::vector<ServingRequest> requests;
  for (size_t i = 0; i < inputs.size(); ++i) {
    std::vector<int32_t> ids(static_cast<size_t>(inputs[i]));
    for (size_t j = 0; j < ids.size(); ++j)
      ids[j] = static_cast<int32_t>((static_cast<size_t>(offsets[i]) + i + j) %
                                    static_cast<size_t>(n_base_tokens));
    requests.push_back(request_of(std::move(ids), outputs[i], o, tokenizer));
  }
  return requests;
}

std::vector<int> random_lengths(int most, const DatasetOptions& o, NumpyRandom& numpy) {
  const int least = static_cast<int>(most * o.range_ratio);
  return numpy.integers(std::max(least, 1), most + 1, o.n_prompts);
}

}  // namespace

std::vector<ServingRequest> make_dataset(const DatasetOptions& o, const Tokenizer& tokenizer,
                                         int n_base_tokens, PythonRandom& python,
                                         NumpyRandom& numpy) {
  if (o.name == "sharegpt") return sharegpt(o, tokenizer, python);
  const std::vector<int> inputs = random_lengths(o.input_tokens, o, numpy);
  const std::vector<int> outputs = random_lengths(o.output_tokens, o, numpy);
  if (o.name == "random") return random_texts(o, tokenizer, python, inputs, outputs);
  check(o.name == "random-ids", "a data set's name");
  return random_ids(o, tokenizer, n_base_tokens, numpy, inputs, outputs);
}

int base_tokens(const std::string& directory, const Tokenizer& tokenizer) {
  const std::string file = directory + "/tokenizer.json";
  if (!std::filesystem::exists(file)) return tokenizer.vocab_size();
  const nlohmann::json json = parse_json(read_text_file(file, kMaxTokenizerBytes), file);
  return static_cast<int>(json.at("model").at("vocab").size());
}

}  // namespace tandem
