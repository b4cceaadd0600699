// Reads generation requests from the JSON of /v1/completions, /v1/chat/completions and SGLang's
// /generate. Pure functions; an invalid field throws an ApiError that names it.
#pragma once
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "scheduling/sampler.h"
#include "server/response_format.h"

namespace tandem {

enum class Endpoint { kCompletions, kChat, kGenerate };

using Prompt = std::variant<std::string, std::vector<int32_t>>;  // text or ids

struct GenerationRequest {
  Endpoint endpoint = Endpoint::kCompletions;
  std::string model;                                    // empty: the served model
  std::vector<Prompt> prompts;                          // empty for a chat
  nlohmann::ordered_json messages, template_arguments;  // chat only
  nlohmann::ordered_json tools = nullptr;               // null, or an array that is not empty
  bool add_generation_prompt = true;
  bool add_special_tokens = true;     // BOS before a text prompt, if the tokenizer adds it
  bool requires_tool_call = false;    // the answer must consist of tool calls ..
  std::string required_tool;          // .. or, if not empty, of one call of this function
  bool allows_parallel_calls = true;  // a grammar allows several calls

  ResponseFormat response_format;

  std::optional<int> max_tokens;  // nullopt: the rest of the context
  int min_tokens = 0;
  SamplingParams sampling;
  bool has_seed = false;
  int n = 1;  // answers per prompt
  std::vector<std::string> stops;
  std::vector<int32_t> stop_ids;  // in addition to the model's own
  bool ignore_eos = false;
  bool skip_special = true;
  bool include_stop = false;  // include the stop string in the text
  bool echo = false;          // include the prompt in the text and in the log-probabilities

  bool stream = false;
  bool include_usage = false;     // usage in a last chunk without choices
  bool continuous_usage = false;  // usage in every chunk
  bool reasoning = true;          // chat: return reasoning separately from the content
  std::optional<double> timeout_seconds;

  bool wants_logprobs() const { return sampling.n_top_logprobs >= 0; }
};

// Sampling parameters for fields that a request does not have: OpenAI's defaults, or those of the
// model's generation_config.json.
struct SamplingDefaults {
  float temperature = 1, top_p = 1, repetition_penalty = 1;
  int top_k = 0;
};
SamplingDefaults sampling_defaults(const nlohmann::json& generation_config);

GenerationRequest parse_completion_request(const nlohmann::ordered_json& json,
                                           const SamplingDefaults& defaults);
GenerationRequest parse_chat_request(const nlohmann::ordered_json& json,
                                     const SamplingDefaults& defaults);
GenerationRequest parse_generate_request(const nlohmann::ordered_json& json,
                                         const SamplingDefaults& defaults);

}  // namespace tandem
