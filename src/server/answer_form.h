// What form a client wants its answer in, in any of the spellings that are about: OpenAI's
// response_format, vLLM's structured_outputs and guided_.., SGLang's.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "server/request_fields.h"

namespace tandem {

struct AnswerForm {
  enum class Kind { kFree, kSchema, kPattern, kChoice };
  Kind kind = Kind::kFree;
  nlohmann::ordered_json schema = {};     // of JSON; of any object, {"type": "object"}
  std::string pattern = {};               // a regular expression for the whole answer
  std::vector<std::string> choices = {};  // one of these
  std::string field = {};                 // that asked for it
};

// Throws ApiError for a form that is not there, and for two at once.
AnswerForm read_answer_form(const RequestFields& request);

}  // namespace tandem
