#include "text/grammar/token_trie.h"

#include <algorithm>

namespace tandem {

TokenTrie::TokenTrie(const Tokenizer& tokenizer) : vocab_size_(tokenizer.vocab_size()) {
  std::vector<std::pair<std::string_view, int32_t>> sorted;
  for (int32_t id = 0; id < vocab_size_; ++id)
    if (tokenizer.has_token(id) && !tokenizer.is_added(id))
      sorted.emplace_back(tokenizer.bytes_of(id), id);
  std::sort(sorted.begin(), sorted.end());

  nodes_.push_back({.end = 0, .first_token = 0, .depth = 0, .byte = 0});
  std::vector<int32_t> path = {kRoot};
  std::string_view last;
  const auto close = [&](size_t depth) {
    for (; path.size() > depth + 1; path.pop_back())
      nodes_[path.back()].end = static_cast<int32_t>(nodes_.size());
  };
  for (const auto& [bytes, id] : sorted) {
    const auto differs = std::mismatch(last.begin(), last.end(), bytes.begin(), bytes.end());
    close(static_cast<size_t>(differs.first - last.begin()));
    for (size_t depth = path.size() - 1; depth < bytes.size(); ++depth) {
      path.push_back(static_cast<int32_t>(nodes_.size()));
      nodes_.push_back({.end = 0,
                        .first_token = static_cast<int32_t>(tokens_.size()),
                        .depth = static_cast<uint16_t>(depth + 1),
                        .byte = static_cast<uint8_t>(bytes[depth])});
    }
    tokens_.push_back(id);
    last = bytes;
  }
  close(0);
  nodes_[kRoot].end = static_cast<int32_t>(nodes_.size());
  nodes_.push_back({.end = nodes_[kRoot].end,
                    .first_token = static_cast<int32_t>(tokens_.size()),
                    .depth = 0,
                    .byte = 0});
}

std::span<const int32_t> TokenTrie::tokens(int32_t i) const {
  const int32_t first = nodes_[i].first_token;
  return std::span(tokens_).subspan(first, nodes_[i + 1].first_token - first);
}

}  // namespace tandem
