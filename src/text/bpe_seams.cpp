#include "text/bpe_seams.h"

#include <bit>

#include "text/utf8.h"

namespace tandem {
namespace {

// Placeholders for characters of which a token contains only the last bytes (kTail) or only the
// first bytes (kHead + lead byte). Larger than any code point.
constexpr char32_t kTail = 0x110000;
constexpr char32_t kHead = 0x110100;

bool continues(char byte) { return (static_cast<unsigned char>(byte) & 0xC0) == 0x80; }

}  // namespace

BpeSeams::BpeSeams(size_t n_tokens) : bits_(std::bit_ceil(n_tokens / 8 + 1)) {}

void BpeSeams::add(std::string_view token) {
  char32_t left = 0;  // unused before the first character is read
  for (size_t at = 0; at < token.size();) {
    size_t end = at + 1;
    while (end < token.size() && continues(token[end])) ++end;
    const std::string_view character = token.substr(at, end - at);
    const bool whole = find_invalid_utf8(character) == std::string_view::npos;
    const char32_t right = whole ? decode_utf8(character, 0).value
                                 : kHead + static_cast<unsigned char>(character.front());
    if (at > 0) mark(left, right);
    left = whole ? right : kTail;
    at = end;
  }
}

bool BpeSeams::may_merge(char32_t left, char32_t right, unsigned char right_lead) const {
  return marked(left, right) || marked(left, kHead + right_lead) || marked(kTail, right) ||
         marked(kTail, kHead + right_lead);
}

void BpeSeams::mark(char32_t left, char32_t right) {
  const size_t b = bit(left, right);
  bits_[b / 64] |= uint64_t{1} << b % 64;
}

bool BpeSeams::marked(char32_t left, char32_t right) const {
  const size_t b = bit(left, right);
  return (bits_[b / 64] >> b % 64 & 1) != 0;
}

size_t BpeSeams::bit(char32_t left, char32_t right) const {
  const uint64_t hash = (uint64_t{left} << 21 ^ right) * 0x9E3779B97F4A7C15u;
  return hash >> 32 & (64 * bits_.size() - 1);
}

}  // namespace tandem
