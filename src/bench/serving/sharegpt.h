// Conversations of a ShareGPT file, of which benchmarks take the first two turns.
#pragma once
#include <string>
#include <utility>
#include <vector>

namespace tandem {

// (first turn, second turn) of every conversation that has two, in the file's order. The file is a
// JSON list of {"conversations": [{"value": text}, ..]}; "conversation" is another name for it.
// Throws Error naming the file.
std::vector<std::pair<std::string, std::string>> read_sharegpt(const std::string& path);

}  // namespace tandem
