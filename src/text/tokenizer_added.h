// Added tokens: strings such as <think> that are one token wherever they occur in a text.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace tandem {

struct AddedToken {
  int32_t id;
  std::string text;
  bool special = false;     // omitted from decoded text on request
  bool normalized = false;  // matched after all other added tokens, in the text between them
};

// A trie over the texts of a set of tokens. Immutable and thread-safe.
class AddedTokenTrie {
 public:
  void insert(std::string_view text, int32_t id);

  struct Found {
    size_t begin = std::string_view::npos, end = 0;  // byte offsets
    int32_t id = -1;
  };
  // The leftmost token in `text` at or after byte `start`, the longest of those that begin at the
  // same byte. begin is npos if there is none.
  Found find(std::string_view text, size_t start) const;

 private:
  uint32_t child(uint32_t node, unsigned char byte) const;

  static constexpr uint32_t kNone = UINT32_MAX;
  std::array<bool, 256> first_bytes_{};
  std::unordered_map<uint64_t, uint32_t> children_;  // node * 256 + byte -> node; 0 is the root
  std::vector<int32_t> ids_ = {-1};                  // [nodes] -1: no token ends here
};

}  // namespace tandem
