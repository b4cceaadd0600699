#include "router/backend_list.h"

#include <algorithm>

#include "core/check.h"

namespace tandem {
namespace {

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kSpaces = " \t\r";
  const size_t first = text.find_first_not_of(kSpaces);
  if (first == text.npos) return {};
  return text.substr(first, text.find_last_not_of(kSpaces) - first + 1);
}

void append(std::vector<HttpAddress>& backends, std::string_view url, const std::string& what) {
  HttpAddress address = parse_http_address(url, what);
  for (const HttpAddress& other : backends)
    require(other.authority != address.authority, "{} {}: is there twice", what, address.url());
  backends.push_back(std::move(address));
}

// Calls `use` for the parts between separators.
template <class Use>
void split(std::string_view text, char separator, Use use) {
  for (size_t first = 0; first <= text.size();) {
    const size_t end = std::min(text.find(separator, first), text.size());
    use(trimmed(text.substr(first, end - first)));
    first = end + 1;
  }
}

}  // namespace

std::vector<HttpAddress> parse_backends(std::string_view text) {
  std::vector<HttpAddress> backends;
  split(text, ',', [&](std::string_view url) { append(backends, url, "--backends"); });
  return backends;
}

std::vector<HttpAddress> parse_backends_file(std::string_view text, const std::string& file) {
  std::vector<HttpAddress> backends;
  int line = 0;
  split(text, '\n', [&](std::string_view entry) {
    ++line;
    const std::string_view url = trimmed(entry.substr(0, entry.find('#')));
    if (!url.empty()) append(backends, url, fmt::format("{} line {}:", file, line));
  });
  return backends;
}

}  // namespace tandem
