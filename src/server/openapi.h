// The OpenAPI 3.1 document of the server's API: src/server/openapi.json.
#pragma once
#include <string_view>

namespace tandem {

std::string_view openapi();

}  // namespace tandem
