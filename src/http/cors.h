// Cross-origin requests: which pages of other origins may read responses (Fetch standard,
// "HTTP-CORS protocol").
#pragma once
#include <string>
#include <vector>

namespace tandem {

// The CORS headers of a request, which describe the page that sends it.
struct CorsHeaders {
  std::string origin;            // "https://example.org"; empty: not from a page
  std::string requested_method;  // method named in a preflight request, else empty
};

// Header lines of a response; empty if the origin is not in `allowed`. "*" allows any origin.
std::string cors_headers(const std::vector<std::string>& allowed, const CorsHeaders& request);

}  // namespace tandem
