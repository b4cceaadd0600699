// The address of a server that this program asks: http://HOST:PORT or https://HOST:PORT.
#pragma once
#include <string>
#include <string_view>

namespace tandem {

struct HttpAddress {
  std::string host;  // a name or an IP address, without brackets
  int port = 80;
  std::string authority;  // HOST:PORT as in a Host header
  bool tls = false;       // https

  std::string url() const { return (tls ? "https://" : "http://") + authority; }
};

// Parses a URL without path, such as http://127.0.0.1:8001 or https://[::1]:8001/. Throws Error,
// which begins with `what`, for anything else.
HttpAddress parse_http_address(std::string_view url, std::string_view what);

}  // namespace tandem
