// Packed INT4 of compressed-tensors, with words written by hand.
#include "ops/int4_words.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <vector>

namespace tandem {
namespace {

std::vector<std::byte> bytes_of(const std::vector<int>& values) {
  std::vector<std::byte> bytes;
  for (const int v : values) bytes.push_back(static_cast<std::byte>(v));
  return bytes;
}

// The numbers -8 -7 -1 0 1 2 6 7, plus 8, are 0 1 7 8 9 a e f; the first is in the lowest bits:
// 0xfea98710. The kernels need number b in the low half of byte b and number 4 + b in the high
// half, in two's complement: (-8, 1) (-7, 2) (-1, 6) (0, 7) are 18 29 6f 70.
const std::vector<std::byte> kWord = bytes_of({0x10, 0x87, 0xa9, 0xfe});
const std::vector<std::byte> kCodes = bytes_of({0x18, 0x29, 0x6f, 0x70});

TEST(Int4Words, OneWordByHand) {
  float values[8];
  int4_values(kWord.data(), 8, values);
  EXPECT_EQ(std::vector<float>(values, values + 8),
            (std::vector<float>{-8, -7, -1, 0, 1, 2, 6, 7}));
  std::vector<std::byte> codes(4);
  int4_codes(kWord.data(), 8, codes.data());
  EXPECT_EQ(codes, kCodes);
  EXPECT_EQ(int4_sum(kCodes.data(), 8), 0);
}

// The number at index i in the kernels' code layout.
int code_at(const std::vector<std::byte>& codes, int i) {
  const int pair = static_cast<int>(codes[i / 8 * 4 + i % 4]);
  const int code = i % 8 < 4 ? pair & 15 : pair >> 4;
  return code < 8 ? code : code - 16;
}

TEST(Int4Words, EveryNumberAtEveryPlaceOfAnOddAddress) {
  constexpr int kNumbers = 8 * 8 * 16;
  std::vector<std::byte> words(1 + kNumbers / 2);
  std::vector<int> want;
  for (int w = 0; w < kNumbers / 8; ++w)  // one of the eight positions counts through all numbers
    for (int place = 0; place < 8; ++place) {
      const int number = place == w / 16 ? w % 16 - 8 : place - 4;
      words[1 + w * 4 + place / 2] |= static_cast<std::byte>((number + 8) << place % 2 * 4);
      want.push_back(number);
    }
  std::vector<float> values(kNumbers);
  int4_values(words.data() + 1, kNumbers, values.data());
  std::vector<std::byte> codes(kNumbers / 2);
  int4_codes(words.data() + 1, kNumbers, codes.data());
  for (int i = 0; i < kNumbers; ++i) {
    ASSERT_EQ(values[i], want[i]) << i;
    ASSERT_EQ(code_at(codes, i), want[i]) << i;
  }
  for (int first = 0; first < kNumbers; first += 32) {
    int sum = 0;
    for (int i = first; i < first + 32; ++i) sum += want[i];
    ASSERT_EQ(int4_sum(codes.data() + first / 2, 32), sum);
  }
}

TEST(Int4Words, SumsOfTheLargestNumbers) {
  const std::vector<std::byte> least(64, std::byte{0x88}), most(64, std::byte{0x77});
  EXPECT_EQ(int4_sum(least.data(), 128), -1024);
  EXPECT_EQ(int4_sum(most.data(), 128), 896);
}

}  // namespace
}  // namespace tandem
