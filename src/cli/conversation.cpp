#include "cli/conversation.h"

#include <charconv>
#include <nlohmann/json.hpp>

#include "cli/console.h"
#include "cli/options.h"
#include "scheduling/answer_stream.h"

namespace tandem {
namespace {

std::pair<int32_t, float> parse_bias(const std::string& text) {
  int32_t id = 0;
  float value = 0;
  const char* end = text.data() + text.size();
  const auto [equals, id_error] = std::from_chars(text.data(), end, id);
  const bool has_value = id_error == std::errc() && equals != end && *equals == '=';
  const auto [rest, error] = has_value ? std::from_chars(equals + 1, end, value)
                                       : std::from_chars_result{end, std::errc::invalid_argument};
  require(error == std::errc() && rest == end, "--logit-bias {}: give ID=VALUE, such as 1=-100",
          text);
  return {id, value};
}

}  // namespace

nlohmann::ordered_json first_messages(std::string_view system, std::string_view user) {
  nlohmann::ordered_json messages = nlohmann::ordered_json::array();
  if (!system.empty()) messages.push_back({{"role", "system"}, {"content", system}});
  messages.push_back({{"role", "user"}, {"content", user}});
  return messages;
}

Request make_request(const GenerateOptions& options, const Tokenizer& tokenizer,
                     std::vector<int32_t> prompt) {
  Request request{.prompt = std::move(prompt),
                  .max_new_tokens = options.max_new_tokens,
                  .sampling = options.sampling,
                  .stop_ids = {}};
  if (!options.ignore_eos) request.stop_ids = tokenizer.stop_ids();
  for (const std::string& bias : options.logit_bias)
    request.sampling.logit_bias.push_back(parse_bias(bias));
  return request;
}

Engine engine_for(LoadedModel& loaded, const Tokenizer& tokenizer) {
  return {loaded.model(),
          loaded.cache(),
          vocabulary_of(tokenizer, loaded.config().vocab),
          loaded.context(),
          {.drafting = loaded.drafting()}};
}

Answer generate(Engine& engine, const Tokenizer& tokenizer, const Request& request,
                const std::vector<std::string>& stops,
                const std::function<void(std::string_view)>& on_text,
                const std::function<void(const TokenEvent&)>& on_token) {
  Answer answer;
  const auto emit = [&](const AnswerPart& part) {
    answer.text += part.text;
    if (on_text) on_text(part.text);
  };
  AnswerStream stream(tokenizer, {.stops = stops, .on_part = emit});
  const CompletionHooks hooks{.on_token =
                                  [&](int, const TokenEvent& event) {
                                    if (on_token) on_token(event);
                                    TokenEvent token;
                                    token.token = event.token;
                                    return stream.push(token);
                                  },
                              .cancelled = Interrupt::pending,
                              .on_prefill = show_prefill};
  answer.completion = std::move(complete(engine, {&request, 1}, hooks).front());
  TokenEvent end;
  end.finish = answer.completion.finish;
  stream.push(end);
  return answer;
}

const char* name_of(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kDeadline:
      return "deadline";
    case FinishReason::kFailed:
      return "failed";
    case FinishReason::kCancelled:
      break;
  }
  return "cancelled";
}

double prefill_rate(const Request& request, const Completion& c) {
  const auto n = static_cast<double>(request.prompt.size()) - c.cached_tokens;
  return c.prefill_seconds > 0 ? n / c.prefill_seconds : 0;
}

double decode_rate(const Completion& c) {
  return c.decode_seconds > 0 ? (static_cast<double>(c.tokens.size()) - 1) / c.decode_seconds : 0;
}

// Empty if nothing was drafted.
std::string draft_text(const Completion& c) {
  const auto n_accepted = static_cast<double>(c.accepted_drafts);
  const double n_drafts = n_accepted + c.rejected_drafts;
  if (n_drafts == 0) return {};
  const double n_decoded = std::max(0.0, static_cast<double>(c.tokens.size()) - 1);
  return fmt::format("; {:.2f} tokens a step, {:.0f} % of {:.0f} drafts accepted",
                     n_decoded / std::max(1.0, n_decoded - n_accepted), 100 * n_accepted / n_drafts,
                     n_drafts);
}

std::string timings(const LoadedModel& loaded, const Request& request, const Completion& c) {
  std::string line = fmt::format(
      "prompt {} tokens at {:.1f}/s ({} from the cache), answer {} tokens at {:.1f}/s, {} threads, "
      "{}",
      request.prompt.size(), prefill_rate(request, c), c.cached_tokens, c.tokens.size(),
      decode_rate(c), loaded.n_threads(), loaded.isa());
  return line + draft_text(c);
}

}  // namespace tandem
