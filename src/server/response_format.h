// Reads the output format that a client requests, in the fields of OpenAI (response_format), vLLM
// (structured_outputs, guided_..) and SGLang (json_schema, regex).
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "server/request_fields.h"

namespace tandem {

struct ResponseFormat {
  enum class Kind { kText, kSchema, kPattern, kChoice };
  Kind kind = Kind::kText;
  nlohmann::ordered_json schema = {};     // kSchema: JSON Schema; {"type": "object"} for any object
  std::string pattern = {};               // kPattern: regular expression for the whole answer
  std::vector<std::string> choices = {};  // kChoice: the answer is one of these
  std::string field = {};                 // the request field that specified the format
};

// Throws ApiError for an unsupported format, and for more than one format in a request.
ResponseFormat read_response_format(const RequestFields& request);

}  // namespace tandem
