// From what a person says to token ids, and from a completion to what is kept of it.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/completion.h"
#include "io/chat_format.h"
#include "io/tokenizer.h"
#include "loaded_model.h"
#include "options.h"

namespace tandem {

// [system,] user. No system message when `system` is empty.
nlohmann::ordered_json first_messages(std::string_view system, std::string_view user);

// One answer: the request as the options describe it.
Request make_request(const GenerateOptions& options, const Tokenizer& tokenizer,
                     std::vector<int32_t> prompt);

// What a model with so many rows of logits may say.
Vocabulary vocabulary_of(const Tokenizer& tokenizer, int model_vocab);

// What a loaded model needs to answer one request at a time.
Engine engine_for(LoadedModel& loaded, const Tokenizer& tokenizer);

struct Answer {
  std::string text;
  Completion completion;
};

// Runs one request. `on_text` gets text as it becomes certain: complete characters, no part of a
// stop string.
Answer generate(Engine& engine, const Tokenizer& tokenizer, const Request& request,
                const std::vector<std::string>& stops,
                const std::function<void(std::string_view)>& on_text,
                const std::function<void(const TokenEvent&)>& on_token = {});

const char* name_of(FinishReason reason);  // "stop", "length", "cancelled"

// One line: speeds of a completion.
std::string timings(const LoadedModel& loaded, const Request& request,
                    const Completion& completion);

double prefill_rate(const Request& request, const Completion& completion);  // tokens a second
double decode_rate(const Completion& completion);

}  // namespace tandem
