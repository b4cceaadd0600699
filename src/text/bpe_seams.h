// Pairs of adjacent characters that occur together in some token. Text may be cut between any other
// pair before it is encoded.
#pragma once
#include <cstdint>
#include <string_view>
#include <vector>

namespace tandem {

// A merge across a seam, the boundary of two characters, makes a token that contains both. If no
// token of the vocabulary contains the two characters next to each other, nothing merges across the
// seam, and the two sides can be encoded separately with the same result. This holds for some 40 %
// of the seams in Chinese text and cuts runs of dozens of characters into words.
class BpeSeams {
 public:
  // `n_tokens` sets the size of the table: at least 8 bits per token. (DeepSeek-V3 has 36,000 seams
  // in 128,000 tokens.)
  explicit BpeSeams(size_t n_tokens);

  // `token` may begin and end inside a character.
  void add(std::string_view token);

  // Whether some token may contain `left` followed by `right`. Never a false negative, rarely a
  // false positive. `right_lead` is the first byte of `right`.
  bool may_merge(char32_t left, char32_t right, unsigned char right_lead) const;

 private:
  size_t bit(char32_t left, char32_t right) const;
  void mark(char32_t left, char32_t right);
  bool marked(char32_t left, char32_t right) const;

  std::vector<uint64_t> bits_;  // Bloom filter of seams; its size is a power of two
};

}  // namespace tandem
