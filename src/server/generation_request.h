// What a client asks to be generated, read from the JSON of /v1/completions, /v1/chat/completions
// or SGLang's /generate. Pure functions; every wrong field is an ApiError that names it.
#pragma once
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "engine/sampler.h"
#include "server/answer_form.h"

namespace tandem {

enum class Endpoint { kCompletions, kChat, kGenerate };

using Prompt = std::variant<std::string, std::vector<int32_t>>;  // text or ids

struct GenerationRequest {
  Endpoint endpoint = Endpoint::kCompletions;
  std::string model;                                    // empty: whichever is served
  std::vector<Prompt> prompts;                          // not of a chat
  nlohmann::ordered_json messages, template_arguments;  // of a chat
  nlohmann::ordered_json tools = nullptr;               // null, or an array that is not empty
  bool add_generation_prompt = true;
  bool add_special_tokens = true;  // BOS before a prompt that is a text, where the model wants it
  bool must_call = false;          // an answer is calls of tools ..
  std::string must_call_name;      // .. one of this function, unless it is empty
  bool may_call_many = true;       // forced calls

  AnswerForm form;

  std::optional<int> max_tokens;  // missing: what the context leaves
  int min_tokens = 0;
  SamplingParams sampling;
  bool has_seed = false;
  int n = 1;  // answers to each prompt
  std::vector<std::string> stops;
  std::vector<int32_t> stop_ids;  // beside the model's own
  bool ignore_eos = false;
  bool skip_special = true;
  bool keeps_stop = false;  // the stop string is part of the text
  bool echo = false;        // the prompt is part of the text, and of the log-probabilities

  bool stream = false;
  bool include_usage = false;     // a last chunk without choices
  bool continuous_usage = false;  // in every chunk of a chat
  bool reasoning = true;          // thinking apart from the answer
  std::optional<double> timeout_seconds;

  bool wants_logprobs() const { return sampling.n_top_logprobs >= 0; }
};

// What holds where a request says nothing: OpenAI's, or the model's generation_config.json.
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
