// From user input to token ids, and from a completion to its text.
#pragma once
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "engine/completion.h"
#include "loader/loaded_model.h"
#include "text/tokenizer.h"

namespace tandem {

struct GenerateOptions;

// [system,] user. Without a system message if `system` is empty.
nlohmann::ordered_json first_messages(std::string_view system, std::string_view user);

// A request for one answer according to the options.
Request make_request(const GenerateOptions& options, const Tokenizer& tokenizer,
                     std::vector<int32_t> prompt);

// An engine that answers one request at a time.
Engine engine_for(LoadedModel& loaded, const Tokenizer& tokenizer);

struct Answer {
  std::string text;
  Completion completion;
};

// Runs one request. `on_text` gets text as soon as it is final: complete characters, and no part of
// a possible stop string.
Answer generate(Engine& engine, const Tokenizer& tokenizer, const Request& request,
                const std::vector<std::string>& stops,
                const std::function<void(std::string_view)>& on_text,
                const std::function<void(const TokenEvent&)>& on_token = {});

const char* name_of(FinishReason reason);  // "stop", "length", "cancelled"

// "2.60 tokens a step, 81 % of 40 drafts accepted".
std::string draft_text(const Completion& completion);

// The speeds of a completion, in one line.
std::string timings(const LoadedModel& loaded, const Request& request,
                    const Completion& completion);

double prefill_rate(const Request& request, const Completion& completion);  // tokens per second
double decode_rate(const Completion& completion);

}  // namespace tandem
