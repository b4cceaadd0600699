// A refusal as OpenAI's clients expect it: an HTTP status and {"error": {message, type, param,
// code}}.
#pragma once
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>

namespace tandem {

struct ApiError : std::runtime_error {
  ApiError(int http_status, const std::string& message, std::string field = {},
           std::string error_code = {})
      : std::runtime_error(message),
        status(http_status),
        param(std::move(field)),
        code(std::move(error_code)) {}

  int status;
  std::string param;  // the field that is wrong, such as "messages[2].role"; empty: none
  std::string code;   // for programs, such as "context_length_exceeded"; empty: none
};

nlohmann::ordered_json error_json(const ApiError& error);

}  // namespace tandem
