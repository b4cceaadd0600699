#include "http/api_error.h"

namespace tandem {
namespace {

const char* type_of(int status) {
  if (status == 401) return "authentication_error";
  if (status == 404) return "not_found_error";
  return status < 500 ? "invalid_request_error" : "server_error";
}

}  // namespace

nlohmann::ordered_json error_json(const ApiError& error) {
  const auto or_null = [](const std::string& text) {
    return text.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(text);
  };
  return {{"error",
           {{"message", error.what()},
            {"type", type_of(error.status)},
            {"param", or_null(error.param)},
            {"code", or_null(error.code)}}}};
}

}  // namespace tandem
