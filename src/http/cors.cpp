#include "http/cors.h"

#include <fmt/format.h>

#include <algorithm>

namespace tandem {

std::string cors_headers(const std::vector<std::string>& allowed, const CorsHeaders& request) {
  if (request.origin.empty()) return "";
  const auto has = [&](const std::string& origin) {
    return std::find(allowed.begin(), allowed.end(), origin) != allowed.end();
  };
  std::string lines;
  if (has("*")) {
    lines = "Access-Control-Allow-Origin: *\r\n";
  } else if (has(request.origin)) {
    lines = fmt::format("Access-Control-Allow-Origin: {}\r\nVary: Origin\r\n", request.origin);
  }
  if (lines.empty() || request.requested_method.empty()) return lines;
  // The asterisk covers every header except Authorization.
  return lines +
         "Access-Control-Allow-Methods: GET, POST\r\n"
         "Access-Control-Allow-Headers: *, Authorization\r\n"
         "Access-Control-Max-Age: 600\r\n";
}

}  // namespace tandem
