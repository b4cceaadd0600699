#include "router/backend_list.h"

#include <algorithm>

#include "core/check.h"
#include "io/listed_lines.h"

namespace tandem {
namespace {

void append(std::vector<HttpAddress>& backends, std::string_view url, const std::string& what) {
  HttpAddress address = parse_http_address(url, what);
  for (const HttpAddress& other : backends)
    require(other.authority != address.authority, "{} {}: is there twice", what, address.url());
  backends.push_back(std::move(address));
}

}  // namespace

std::vector<HttpAddress> parse_backends(std::string_view text) {
  std::vector<HttpAddress> backends;
  for (size_t first = 0; first <= text.size();) {
    const size_t end = std::min(text.find(',', first), text.size());
    append(backends, trimmed(text.substr(first, end - first)), "--backends");
    first = end + 1;
  }
  return backends;
}

std::vector<HttpAddress> parse_backends_file(std::string_view text, const std::string& file) {
  std::vector<HttpAddress> backends;
  for (const ListedLine& line : listed_lines(text))
    append(backends, line.entry, fmt::format("{} line {}:", file, line.number));
  return backends;
}

}  // namespace tandem
