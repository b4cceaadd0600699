// Reads the output format that a client requests, in the fields of OpenAI (response_format), vLLM
// (structured_outputs, guided_..) and SGLang (json_schema, regex).
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "server/request_fields.h"

namespace tandem {

struct AnswerForm {
  enum class Kind { kFree, kSchema, kPattern, kChoice };
  Kind kind = Kind::kFree;
  nlohmann::ordered_json schema = {};     // kSchema: JSON Schema; {"type": "object"} for any object
  std::string pattern = {};               // kPattern: regular expression for the whole answer
  std::vector<std::string> choices = {};  // kChoice: the answer is one of these
  std::string field = {};                 // the request field that specified the form
};

// Throws ApiError for an unsupported form, and for more than one form in a request.
AnswerForm read_answer_form(const RequestFields& request);

}  // namespace tandem
