#include "api/api_request.h"

#include <algorithm>

#include "api/api_structs.h"
#include "io/json.h"

namespace tandem {

std::vector<int32_t> prompt_of(const tandem_request& r, const Tokenizer& tokenizer,
                               const ChatFormat* chat) {
  require((r.text != nullptr) + (r.messages != nullptr) + (r.tokens != nullptr) == 1,
          "a request has one of text, messages and tokens");
  if (r.tokens) return {r.tokens, r.tokens + r.n_tokens};
  if (r.text) return raw_prompt(tokenizer, r.text);
  require(chat != nullptr, "messages: the model has no chat template; use text");
  const auto messages = parse_ordered_json(r.messages, "messages");
  require(messages.is_array(), "messages: must be a JSON array");
  for (size_t i = 0; i < messages.size(); ++i)
    require(
        messages[i].is_object() && messages[i].contains("role") && messages[i]["role"].is_string(),
        "messages[{}]: must be an object with a role", i);
  return chat->prompt(messages);
}

Request request_of(const tandem_request& r, std::vector<int32_t> prompt, const Tokenizer& tokenizer,
                   int64_t context) {
  Request request;
  require(r.max_tokens >= 0, "max_tokens {}: must be 0 (until the context is full) or more",
          r.max_tokens);
  require(r.min_tokens >= 0, "min_tokens {}: must be 0 or more", r.min_tokens);
  // A prompt that fills the context is refused by the engine, which says why.
  const int64_t rest = std::max<int64_t>(context - std::ssize(prompt), 1);
  request.max_new_tokens = r.max_tokens > 0 ? r.max_tokens : static_cast<int>(rest);
  request.prompt = std::move(prompt);
  if (!r.ignore_eos) request.stop_ids = tokenizer.stop_ids();
  for (const int32_t id : array_of(r.stop_tokens, r.n_stop_tokens, "stop_tokens"))
    request.stop_ids.push_back(id);
  SamplingParams& s = request.sampling;
  s.temperature = r.temperature;
  s.top_p = r.top_p == 0 ? 1 : r.top_p;
  s.top_k = r.top_k;
  s.min_p = r.min_p;
  s.repetition_penalty = r.repetition_penalty == 0 ? 1 : r.repetition_penalty;
  s.presence_penalty = r.presence_penalty;
  s.frequency_penalty = r.frequency_penalty;
  for (const tandem_bias& bias : array_of(r.biases, r.n_biases, "biases"))
    s.logit_bias.emplace_back(bias.token, bias.bias);
  s.min_new_tokens = r.min_tokens;
  s.held_back = request.stop_ids;
  s.seed = r.seed;
  require(r.want_logprobs || r.n_top_logprobs == 0, "n_top_logprobs {}: set want_logprobs too",
          r.n_top_logprobs);
  require(r.n_top_logprobs >= 0, "n_top_logprobs {}: must be 0 or more", r.n_top_logprobs);
  if (r.want_logprobs) s.n_top_logprobs = r.n_top_logprobs;
  return request;
}

AnswerStream::Options text_options(const tandem_request& r) {
  AnswerStream::Options options{.stops = {},
                                .skip_special = !r.keep_special,
                                .include_stop = r.include_stop != 0,
                                .min_new_tokens = r.min_tokens,
                                .on_part = {}};
  for (const char* stop : array_of(r.stops, r.n_stops, "stops")) {
    require(stop != nullptr, "a string of stops is NULL");
    options.stops.emplace_back(stop);
  }
  return options;
}

}  // namespace tandem
