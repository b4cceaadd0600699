#include "text/prefix_table.h"

#include <algorithm>
#include <functional>

namespace tandem {

std::vector<uint64_t> prefix_hashes(std::string_view text) {
  std::vector<uint64_t> hashes;
  uint64_t hash = 0;
  for (size_t i = 0; i < std::min(text.size() / kPrefixBlockBytes, kMaxPrefixBlocks); ++i) {
    const std::string_view block = text.substr(i * kPrefixBlockBytes, kPrefixBlockBytes);
    hash = (hash ^ std::hash<std::string_view>()(block)) * 0x9e3779b97f4a7c15 + 1;
    hash ^= hash >> 29;
    hashes.push_back(hash);
  }
  return hashes;
}

// The last block is added first, so that the beginning of a text is forgotten after its end.
void PrefixTable::add(const std::vector<uint64_t>& blocks, int backend) {
  for (auto block = blocks.rbegin(); block != blocks.rend(); ++block) {
    const auto found = by_hash_.find(*block);
    if (found != by_hash_.end()) {
      entries_.splice(entries_.begin(), entries_, found->second);
    } else {
      entries_.push_front({.hash = *block, .backends = {kNone, kNone, kNone, kNone}});
      by_hash_[*block] = entries_.begin();
    }
    auto& backends = entries_.front().backends;
    auto place = std::find(backends.begin(), backends.end(), backend);
    if (place == backends.end()) *--place = backend;
    std::rotate(backends.begin(), place, place + 1);
  }
  while (entries_.size() > max_blocks_) {
    by_hash_.erase(entries_.back().hash);
    entries_.pop_back();
  }
}

std::map<int, size_t> PrefixTable::find(const std::vector<uint64_t>& blocks) const {
  std::map<int, size_t> n_blocks;
  for (size_t i = 0; i < blocks.size(); ++i) {
    const auto found = by_hash_.find(blocks[i]);
    if (found == by_hash_.end()) break;
    for (const int backend : found->second->backends) {
      if (backend == kNone) continue;
      if (i == 0) n_blocks[backend] = 1;
      const auto known = n_blocks.find(backend);
      if (known != n_blocks.end() && known->second == i) known->second = i + 1;
    }
  }
  return n_blocks;
}

void PrefixTable::forget(int backend) {
  for (auto entry = entries_.begin(); entry != entries_.end();) {
    auto& backends = entry->backends;
    std::replace(backends.begin(), backends.end(), backend, kNone);
    std::stable_partition(backends.begin(), backends.end(), [](int b) { return b != kNone; });
    if (backends.front() != kNone) {
      ++entry;
      continue;
    }
    by_hash_.erase(entry->hash);
    entry = entries_.erase(entry);
  }
}

}  // namespace tandem
