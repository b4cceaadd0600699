// Reads model.safetensors.index.json, which says which file contains which tensor.
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace tandem {

constexpr std::string_view kShardIndexName = "model.safetensors.index.json";

struct ShardIndex {
  struct Entry {
    std::string tensor;
    int file;  // index in files
  };
  std::vector<Entry> entries;
  std::vector<std::string> files;  // relative to the directory, sorted
};

// Throws Error for broken JSON, a missing weight_map, a tensor listed twice, and a file name that
// points outside the directory.
ShardIndex read_shard_index(const std::string& path);
ShardIndex parse_shard_index(std::string_view text, std::string_view source);

}  // namespace tandem
