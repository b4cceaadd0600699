// Which pages of other origins may read answers (Fetch standard, "HTTP-CORS protocol").
#pragma once
#include <string>
#include <vector>

namespace tandem {

// What a browser says of the page that asks.
struct PageOrigin {
  std::string origin;        // "https://example.org"; empty: not a page
  std::string asked_method;  // of the request that the browser asks leave for, else empty
};

// Lines of an answer's head; none where the origin is not among `allowed`. "*" allows any.
std::string cors_headers(const std::vector<std::string>& allowed, const PageOrigin& page);

}  // namespace tandem
