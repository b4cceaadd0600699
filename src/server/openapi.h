// What the server accepts and answers, as an OpenAPI 3.1 document: src/server/openapi.json.
#pragma once
#include <string_view>

namespace tandem {

std::string_view openapi();

}  // namespace tandem
