// An error in the format of OpenAI's API: an HTTP status and {"error": {message, type, param,
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
  std::string param;  // the invalid field, such as "messages[2].role"; empty: none
  std::string code;   // machine-readable, such as "context_length_exceeded"; empty: none
};

nlohmann::ordered_json error_json(const ApiError& error);

}  // namespace tandem
