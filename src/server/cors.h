// Cross-origin requests: which pages of other origins may read answers (Fetch standard, "HTTP-CORS
// protocol").
#pragma once
#include <string>
#include <vector>

namespace tandem {

// What the browser's headers say about the page that sends the request.
struct PageOrigin {
  std::string origin;        // "https://example.org"; empty: not from a page
  std::string asked_method;  // method named in a preflight request, else empty
};

// Header lines of an answer; empty if the origin is not in `allowed`. "*" allows any origin.
std::string cors_headers(const std::vector<std::string>& allowed, const PageOrigin& page);

}  // namespace tandem
