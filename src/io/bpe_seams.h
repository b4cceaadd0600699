// Which neighbouring characters some token holds together. Text may be cut between any others
// before it is encoded.
#pragma once
#include <cstdint>
#include <string_view>
#include <vector>

namespace tandem {

// A merge across a seam makes a token that holds both sides. So where no token of the vocabulary
// holds two characters next to each other, nothing ever merges across, and the two sides can be
// encoded apart with the same result. Some 40 % of the seams in Chinese are such, which turns runs
// of dozens of characters into words.
class BpeSeams {
 public:
  // `n_tokens` sets the size of the table: 8 bits a token. (DeepSeek-V3 has 36,000 seams in 128,000
  // tokens.)
  explicit BpeSeams(size_t n_tokens);

  // `token` may begin and end inside a character.
  void add(std::string_view token);

  // Never false where a token holds `left` before `right`; seldom true elsewhere. `right_lead`:
  // first byte of `right`.
  bool may_merge(char32_t left, char32_t right, unsigned char right_lead) const;

 private:
  size_t bit(char32_t left, char32_t right) const;
  void mark(char32_t left, char32_t right);
  bool marked(char32_t left, char32_t right) const;

  std::vector<uint64_t> bits_;  // a power of two of words; one bit a seam
};

}  // namespace tandem
