#include "http/http_address.h"

#include <algorithm>
#include <charconv>

#include "core/check.h"
#include "io/json.h"

namespace tandem {
namespace {

constexpr std::string_view kScheme = "http://", kTlsScheme = "https://";

bool is_host_character(char c) {
  constexpr std::string_view kOthers = "-._:%";
  return (static_cast<unsigned char>(c) < 0x80 && std::isalnum(static_cast<unsigned char>(c))) ||
         kOthers.find(c) != kOthers.npos;
}

std::string lower(std::string_view text) {
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(), [](char c) {
    return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  });
  return out;
}

}  // namespace

HttpAddress parse_http_address(std::string_view url, std::string_view what) {
  const std::string shown_url = shown(url);
  HttpAddress address;
  address.tls = lower(url.substr(0, kTlsScheme.size())) == kTlsScheme;
  require(address.tls || lower(url.substr(0, kScheme.size())) == kScheme,
          "{} {}: must be http://HOST:PORT or https://HOST:PORT", what, shown_url);
  if (address.tls) address.port = 443;
  std::string_view rest = url.substr(address.tls ? kTlsScheme.size() : kScheme.size());
  if (rest.ends_with('/')) rest.remove_suffix(1);
  std::string_view port;
  bool has_port = false;
  const bool in_brackets = rest.starts_with('[');
  const size_t end = in_brackets ? rest.find(']') : rest.find(':');
  if (in_brackets) {
    require(end != rest.npos, "{} {}: the bracket is not closed", what, shown_url);
    address.host = lower(rest.substr(1, end - 1));
    rest.remove_prefix(end + 1);
    require(rest.empty() || rest.starts_with(':'), "{} {}: must be http://HOST:PORT", what,
            shown_url);
  } else {
    address.host = lower(rest.substr(0, end));
    rest.remove_prefix(std::min(end, rest.size()));
  }
  if (!rest.empty()) {
    has_port = true;
    port = rest.substr(1);
  }
  require(!address.host.empty() &&
              std::all_of(address.host.begin(), address.host.end(), is_host_character) &&
              (in_brackets || address.host.find(':') == std::string::npos),
          "{} {}: must be http://HOST:PORT, with nothing behind", what, shown_url);
  if (has_port) {
    const auto [last, error] =
        std::from_chars(port.data(), port.data() + port.size(), address.port);
    require(error == std::errc() && last == port.data() + port.size() && address.port >= 1 &&
                address.port <= 65535,
            "{} {}: the port must be between 1 and 65535, with nothing behind", what, shown_url);
  }
  address.authority =
      (in_brackets ? "[" + address.host + "]" : address.host) + ":" + std::to_string(address.port);
  return address;
}

}  // namespace tandem
