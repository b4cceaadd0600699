#include "io/listed_lines.h"

#include <algorithm>

namespace tandem {

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kSpaces = " \t\r";
  const size_t first = text.find_first_not_of(kSpaces);
  if (first == text.npos) return {};
  return text.substr(first, text.find_last_not_of(kSpaces) - first + 1);
}

std::vector<ListedLine> listed_lines(std::string_view text) {
  std::vector<ListedLine> lines;
  int number = 0;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const std::string_view line = text.substr(begin, end - begin);
    const std::string_view entry = trimmed(line.substr(0, line.find('#')));
    ++number;
    if (!entry.empty()) lines.push_back({entry, number});
    begin = end + 1;
  }
  return lines;
}

}  // namespace tandem
