// Conversations of a ShareGPT file; benchmarks use the first two turns.
#pragma once
#include <string>
#include <utility>
#include <vector>

namespace tandem {

// (first turn, second turn) of every conversation that has two, in file order. The file is a JSON
// list of {"conversations": [{"value": text}, ..]}; the key may also be "conversation". Throws
// Error naming the file.
std::vector<std::pair<std::string, std::string>> read_sharegpt(const std::string& path);

}  // namespace tandem
