#include "server/generation_request.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <limits>

#include "http/api_error.h"
#include "io/json.h"
#include "server/chat_messages.h"
#include "server/request_fields.h"

namespace tandem {
namespace {

constexpr int kMaxAnswers = 128;
constexpr int kMaxPrompts = 1024;
constexpr int kMaxStops = 16;
constexpr int kMaxLogprobs = 20;
constexpr int64_t kMaxTokens = 1 << 30;

void read_sampling(const RequestFields& fields, const SamplingDefaults& defaults,
                   GenerationRequest& r) {
  const auto number = [&](const char* key, double min, double max, double missing) {
    return static_cast<float>(fields.number(key, min, max, missing));
  };
  SamplingParams& s = r.sampling;
  s.temperature = number("temperature", 0, 2, defaults.temperature);
  const double top_p = fields.number("top_p", 0, 1, defaults.top_p);
  if (top_p == 0) fields.refuse("top_p", "above 0");
  s.top_p = std::max(static_cast<float>(top_p), std::numeric_limits<float>::min());
  // Clients of vLLM and SGLang send -1 for no limit.
  s.top_k = static_cast<int>(
      std::max<int64_t>(0, fields.integer("top_k", -1, kMaxTokens, defaults.top_k)));
  s.min_p = number("min_p", 0, 1, 0);
  s.repetition_penalty = number("repetition_penalty", 0.01, 100, defaults.repetition_penalty);
  s.presence_penalty = number("presence_penalty", -2, 2, 0);
  s.frequency_penalty = number("frequency_penalty", -2, 2, 0);
  const auto seed = fields.integer("seed", std::numeric_limits<int64_t>::min(),
                                   std::numeric_limits<int64_t>::max());
  r.has_seed = seed.has_value();
  s.seed = static_cast<uint64_t>(seed.value_or(0));
  if (const nlohmann::ordered_json* bias = fields.find("logit_bias")) {
    const char* expected = "an object of token ids with numbers between -100 and 100";
    if (!bias->is_object()) fields.refuse("logit_bias", expected);
    for (const auto& [key, value] : bias->items()) {
      int32_t id = -1;
      const char* end = key.data() + key.size();
      const auto parsed = std::from_chars(key.data(), end, id);
      const bool is_id = parsed.ec == std::errc() && parsed.ptr == end && id >= 0;
      if (!is_id || !value.is_number() || !(std::abs(value.get<double>()) <= 100))
        fields.refuse("logit_bias", expected);
      s.logit_bias.emplace_back(id, value.get<float>());
    }
  }
}

// Reads fields with the same meaning in OpenAI's two endpoints and in SGLang's sampling_params.
void read_common(const RequestFields& fields, const SamplingDefaults& defaults,
                 GenerationRequest& r) {
  read_sampling(fields, defaults, r);
  r.n = static_cast<int>(fields.integer("n", 1, kMaxAnswers, 1));
  r.stops = fields.strings("stop", kMaxStops);
  r.stop_ids = fields.ids("stop_token_ids");
  r.ignore_eos = fields.boolean("ignore_eos", false);
  // Benchmarks that set ignore_eos count tokens, so special tokens (EOS) must appear in the text.
  r.skip_special = fields.boolean("skip_special_tokens", !r.ignore_eos);
  r.include_stop =
      fields.boolean("include_stop_str_in_output", false) || fields.boolean("no_stop_trim", false);
  const int64_t min = fields.integer("min_tokens", 0, kMaxTokens, 0);
  r.min_tokens = static_cast<int>(fields.integer("min_new_tokens", 0, kMaxTokens, min));
}

void read_openai(const RequestFields& fields, GenerationRequest& r) {
  r.model = fields.string("model", "");
  r.stream = fields.boolean("stream", false);
  const RequestFields stream = fields.object("stream_options");
  r.include_usage = stream.boolean("include_usage", false);
  r.continuous_usage = stream.boolean("continuous_usage_stats", false);
  r.echo = r.endpoint == Endpoint::kCompletions && fields.boolean("echo", false);
  // max_tokens 0 with echo requests the prompt's log-probabilities only.
  if (const auto n = fields.integer("max_tokens", r.echo ? 0 : 1, kMaxTokens))
    r.max_tokens = static_cast<int>(*n);
  if (fields.find("timeout")) r.timeout_seconds = fields.number("timeout", 0, 1e6, 0);
  r.response_format = read_response_format(fields);
}

Prompt one_prompt(const RequestFields& fields, const nlohmann::ordered_json& value) {
  const char* expected = "a string, a list of strings, a list of token ids or a list of such lists";
  if (value.is_string()) return value.get<std::string>();
  if (!value.is_array()) fields.refuse("prompt", expected);
  std::vector<int32_t> ids;
  for (const nlohmann::ordered_json& item : value) {
    const auto id = as_token_id(item);
    if (!id) fields.refuse("prompt", expected);
    ids.push_back(*id);
  }
  return ids;
}

std::vector<Prompt> read_prompts(const RequestFields& fields) {
  const nlohmann::ordered_json* value = fields.find("prompt");
  if (!value) fields.refuse("prompt", "given");
  const bool is_list = value->is_array() && !value->empty() && !value->front().is_number();
  if (!is_list) return {one_prompt(fields, *value)};
  if (value->size() > kMaxPrompts)
    fields.refuse("prompt", fmt::format("at most {} prompts", kMaxPrompts));
  std::vector<Prompt> prompts;
  for (const nlohmann::ordered_json& item : *value) prompts.push_back(one_prompt(fields, item));
  return prompts;
}

// Further requirements on messages are checked by the chat template.
void read_conversation(const RequestFields& fields, GenerationRequest& r) {
  r.messages = read_chat_messages(fields);
  const nlohmann::ordered_json* arguments = fields.find("chat_template_kwargs");
  if (arguments && !arguments->is_object()) fields.refuse("chat_template_kwargs", "an object");
  r.template_arguments = arguments ? *arguments : nlohmann::ordered_json::object();
  r.add_generation_prompt = fields.boolean("add_generation_prompt", true);
}

// Reads "tool_choice": "auto", "none", "required" or {"type": "function", "function": {"name":
// ..}}.
void read_tool_choice(const RequestFields& fields, GenerationRequest& r) {
  const nlohmann::ordered_json* choice = fields.find("tool_choice");
  if (!choice || *choice == "auto" || *choice == "none") return;
  const char* expected =
      "\"auto\", \"none\", \"required\" or {\"type\": \"function\", \"function\": {\"name\": ..}}";
  if (!choice->is_object() && *choice != "required") fields.refuse("tool_choice", expected);
  if (r.tools.is_null())
    throw ApiError(400, "tool_choice requires a tool call, but there are no tools", "tool_choice");
  r.requires_tool_call = true;
  if (*choice == "required") return;
  const RequestFields named = fields.object("tool_choice");
  if (named.string("type", "") != "function") named.refuse("type", "\"function\"");
  r.required_tool = named.object("function").string("name", "");
  for (const auto& tool : r.tools)
    if (tool["function"]["name"] == r.required_tool) return;
  throw ApiError(
      400,
      fmt::format("tool_choice names {}, which is not one of the tools", shown(r.required_tool)),
      "tool_choice");
}

void read_tools(const RequestFields& fields, GenerationRequest& r) {
  const nlohmann::ordered_json* tools = fields.find("tools");
  const nlohmann::ordered_json* choice = fields.find("tool_choice");
  r.allows_parallel_calls = fields.boolean("parallel_tool_calls", true);
  if (tools && !tools->is_array()) fields.refuse("tools", "a list of functions");
  for (size_t i = 0; tools && i < tools->size(); ++i) {
    const RequestFields tool((*tools)[i], fmt::format("tools[{}].", i));
    if (tool.string("type", "") != "function") tool.refuse("type", "\"function\"");
    const RequestFields function = tool.object("function");
    if (function.string("name", "").empty()) function.refuse("name", "the function's name");
    function.object("parameters");
  }
  const bool uses_tools = tools && !tools->empty() && !(choice && *choice == "none");
  if (uses_tools) r.tools = *tools;
  // The markers around calls may be special tokens. The end token is never part of the text.
  if (uses_tools) r.skip_special = false;
  read_tool_choice(fields, r);
}

// Reads the fields that OpenAI's two endpoints share.
GenerationRequest openai_request(const RequestFields& fields, const SamplingDefaults& defaults,
                                 Endpoint endpoint) {
  GenerationRequest r;
  r.endpoint = endpoint;
  read_openai(fields, r);
  read_common(fields, defaults, r);
  return r;
}

}  // namespace

SamplingDefaults sampling_defaults(const nlohmann::json& config) {
  SamplingDefaults defaults;
  const auto read = [&](const char* key, auto& value, double min, double max) {
    const auto it = config.find(key);
    if (it == config.end() || !it->is_number()) return;
    const double v = it->get<double>();
    if (v >= min && v <= max) value = static_cast<std::remove_reference_t<decltype(value)>>(v);
  };
  if (!config.is_object()) return defaults;
  read("temperature", defaults.temperature, 0, 2);
  read("top_p", defaults.top_p, 1e-6, 1);
  read("top_k", defaults.top_k, 0, 1e6);
  read("repetition_penalty", defaults.repetition_penalty, 0.01, 100);
  return defaults;
}

GenerationRequest parse_completion_request(const nlohmann::ordered_json& json,
                                           const SamplingDefaults& defaults) {
  constexpr int kDefaultTokens = 16;  // as in OpenAI's API
  const RequestFields fields(json);
  GenerationRequest r = openai_request(fields, defaults, Endpoint::kCompletions);
  r.prompts = read_prompts(fields);
  r.add_special_tokens = fields.boolean("add_special_tokens", true);
  if (!r.max_tokens) r.max_tokens = kDefaultTokens;
  r.sampling.n_top_logprobs = static_cast<int>(fields.integer("logprobs", 0, kMaxLogprobs, -1));
  if (r.max_tokens == 0 && !r.wants_logprobs())
    fields.refuse("max_tokens", "at least 1, unless echo and logprobs are given");
  if (!fields.string("suffix", "").empty())
    throw ApiError(400, "suffix is not supported: this server cannot insert text", "suffix",
                   "unsupported");
  if (fields.integer("best_of", 1, kMaxAnswers, r.n) != r.n)
    throw ApiError(400, fmt::format("best_of must be n ({}): answers are not ranked", r.n),
                   "best_of", "unsupported");
  return r;
}

GenerationRequest parse_chat_request(const nlohmann::ordered_json& json,
                                     const SamplingDefaults& defaults) {
  const RequestFields fields(json);
  GenerationRequest r = openai_request(fields, defaults, Endpoint::kChat);
  read_conversation(fields, r);
  if (const auto n = fields.integer("max_completion_tokens", 1, kMaxTokens))
    r.max_tokens = static_cast<int>(*n);
  const int top = static_cast<int>(fields.integer("top_logprobs", 0, kMaxLogprobs, 0));
  const bool requested = fields.boolean("logprobs", false);
  if (top > 0 && !requested) fields.refuse("top_logprobs", "with \"logprobs\": true");
  r.sampling.n_top_logprobs = requested ? top : -1;
  r.reasoning = fields.boolean("separate_reasoning", true);
  read_tools(fields, r);
  return r;
}

GenerationRequest parse_generate_request(const nlohmann::ordered_json& json,
                                         const SamplingDefaults& defaults) {
  constexpr int kDefaultTokens = 128;  // as in SGLang
  const RequestFields fields(json);
  GenerationRequest r;
  r.endpoint = Endpoint::kGenerate;
  const RequestFields sampling = fields.object("sampling_params");
  read_common(sampling, defaults, r);
  r.max_tokens =
      static_cast<int>(sampling.integer("max_new_tokens", 1, kMaxTokens, kDefaultTokens));
  r.stream = fields.boolean("stream", false);
  r.response_format = read_response_format(sampling);
  if (fields.boolean("return_logprob", false))
    throw ApiError(400, "return_logprob is not supported here: use /v1/completions with logprobs",
                   "return_logprob", "unsupported");
  if (r.n != 1) sampling.refuse("n", "1: use /v1/completions for more");
  if (fields.find("input_ids")) {
    r.prompts.emplace_back(fields.ids("input_ids"));
  } else {
    if (!fields.find("text")) fields.refuse("text", "given, unless input_ids are");
    r.prompts.emplace_back(fields.string("text", ""));
  }
  return r;
}

}  // namespace tandem
