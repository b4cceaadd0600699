// Lists that people write into files.
#pragma once
#include <string_view>
#include <vector>

namespace tandem {

// Without the spaces, tabs and carriage returns at its ends.
std::string_view trimmed(std::string_view text);

struct ListedLine {
  std::string_view entry;  // trimmed, not empty
  int number;              // from 1
};

// The entries of a list, one a line; empty lines and what follows a # are left out. `text` outlives
// them.
std::vector<ListedLine> listed_lines(std::string_view text);

}  // namespace tandem
