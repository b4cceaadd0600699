#include "ops/int4_words.h"

#include <cstring>

namespace tandem {
namespace {

constexpr int kPerWord = 8;
constexpr uint32_t kLowNibbles = 0x0f0f0f0f;

uint32_t word(const void* words, int64_t i) {
  uint32_t value;
  std::memcpy(&value, static_cast<const char*>(words) + i * 4, sizeof value);
  return value;
}

// Moves four nibbles to the low halves of four bytes.
uint32_t spread(uint32_t nibbles) {
  const uint32_t pairs = (nibbles | nibbles << 8) & 0x00ff00ff;
  return (pairs | pairs << 4) & kLowNibbles;
}

}  // namespace

// n + 8 as unsigned and n in two's complement differ in the highest bit only.
void int4_codes(const void* words, int64_t n, void* codes) {
  for (int64_t i = 0; i < n / kPerWord; ++i) {
    const uint32_t w = word(words, i);
    const uint32_t code = (spread(w & 0xffff) | spread(w >> 16) << 4) ^ 0x88888888;
    std::memcpy(static_cast<char*>(codes) + i * 4, &code, sizeof code);
  }
}

void int4_values(const void* words, int64_t n, float* values) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t nibble = word(words, i / kPerWord) >> i % kPerWord * 4 & 15;
    values[i] = static_cast<float>(static_cast<int>(nibble) - 8);
  }
}

// Inverting their highest bits gives n + 8 again; the sum of a word fits one byte.
int64_t int4_sum(const void* codes, int64_t n) {
  int64_t sum = -8 * n;
  for (int64_t i = 0; i < n / kPerWord; ++i) {
    const uint32_t w = word(codes, i) ^ 0x88888888;
    sum += ((w & kLowNibbles) + (w >> 4 & kLowNibbles)) * 0x01010101u >> 24;
  }
  return sum;
}

}  // namespace tandem
