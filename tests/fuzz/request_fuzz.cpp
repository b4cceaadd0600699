// The JSON of requests: every body is parsed, or refused by an ApiError with status 400.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "core/check.h"
#include "http/api_error.h"
#include "io/json.h"
#include "server/generation_request.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tandem;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  nlohmann::ordered_json json;
  try {
    json = parse_ordered_json(text, "request");
  } catch (const Error&) {
    return 0;
  }
  for (const auto parse : {parse_completion_request, parse_chat_request, parse_generate_request}) {
    try {
      const GenerationRequest request = parse(json, {});
      if (request.n < 1 || request.sampling.temperature < 0) std::abort();
      if (request.endpoint != Endpoint::kChat) continue;
      // Parsed messages are unchanged by parsing them again.
      const auto again = parse_chat_request({{"messages", request.messages}}, {});
      if (again.messages != request.messages) std::abort();
    } catch (const ApiError& error) {
      if (error.status != 400) std::abort();
    }
  }
  return 0;
}
