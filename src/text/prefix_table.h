// Remembers which backend has computed which beginnings of prompts, so that a request goes where
// its beginning is in the prefix cache. A beginning is known by hashes of its blocks only: a
// collision sends a request to a backend that has to compute more, and changes no answer.
#pragma once
#include <array>
#include <cstdint>
#include <list>
#include <map>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace tandem {

// Characters of a block: about the 64 tokens of a page of the KV cache.
constexpr size_t kPrefixBlockBytes = 256;
// More of a prompt is not looked at.
constexpr size_t kMaxPrefixBlocks = 256;

// A hash for each whole block of the text, of all characters up to its end.
std::vector<uint64_t> prefix_hashes(std::string_view text);

class PrefixTable {
 public:
  explicit PrefixTable(size_t max_blocks = size_t{1} << 17) : max_blocks_(max_blocks) {}

  // The backend is about to compute, or has, all of these blocks. The blocks that were used least
  // recently are forgotten beyond the table's size.
  void add(const std::vector<uint64_t>& blocks, int backend);
  // Number of first blocks that each backend has; backends with none are left out.
  std::map<int, size_t> find(const std::vector<uint64_t>& blocks) const;
  // The backend has lost its cache.
  void forget(int backend);
  size_t size() const { return entries_.size(); }

 private:
  // A block that several backends have is remembered for this many, the ones that used it last.
  static constexpr size_t kMaxBackends = 4;
  static constexpr int kNone = -1;
  struct Entry {
    uint64_t hash = 0;
    std::array<int, kMaxBackends> backends = {};  // the last user first
  };

  const size_t max_blocks_;
  std::list<Entry> entries_;  // the last used first
  std::unordered_map<uint64_t, std::list<Entry>::iterator> by_hash_;
};

}  // namespace tandem
