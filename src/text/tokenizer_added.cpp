#include "text/tokenizer_added.h"

namespace tandem {

AddedTokenTrie::Found AddedTokenTrie::find(std::string_view text, size_t start) const {
  for (size_t begin = start; begin < text.size(); ++begin) {
    if (!first_bytes_[static_cast<unsigned char>(text[begin])]) continue;
    Found longest;
    uint32_t node = 0;
    for (size_t at = begin; at < text.size(); ++at) {
      node = child(node, static_cast<unsigned char>(text[at]));
      if (node == kNone) break;
      if (ids_[node] >= 0) longest = {begin, at + 1, ids_[node]};
    }
    if (longest.id >= 0) return longest;
  }
  return {};
}

void AddedTokenTrie::insert(std::string_view text, int32_t id) {
  first_bytes_[static_cast<unsigned char>(text.front())] = true;
  uint32_t node = 0;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    const auto [at, is_new] =
        children_.try_emplace(uint64_t{node} * 256 + byte, static_cast<uint32_t>(ids_.size()));
    if (is_new) ids_.push_back(-1);
    node = at->second;
  }
  ids_[node] = id;
}

uint32_t AddedTokenTrie::child(uint32_t node, unsigned char byte) const {
  const auto at = children_.find(uint64_t{node} * 256 + byte);
  return at == children_.end() ? kNone : at->second;
}

}  // namespace tandem
