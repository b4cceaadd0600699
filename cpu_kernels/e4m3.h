// The FP8 code of a float.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>

namespace tandem::cpu {

// The nearest E4M3 code of a finite number, ties to even, saturating at 448; the step below 2^-6 is
// 2^-9. Integers only, without branches, so that the compiler computes several numbers at a time.
inline uint8_t to_e4m3(float x) {
  constexpr auto bits_of = [](float v) { return std::bit_cast<int32_t>(v); };
  // Sizes of floats compare as their bits do.
  const int32_t size = std::min(bits_of(x) & 0x7fffffff, bits_of(448));
  // From 2^-6 on: three bits of the fraction stay, and the exponent's bias changes from 127 to 7.
  const int32_t normal = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - ((127 - 7) << 3);
  // Below, codes are multiples of 2^-9, to which the addition of 2^14 rounds.
  const int32_t small = bits_of(std::bit_cast<float>(size) + 0x1p14f) - bits_of(0x1p14f);
  const int32_t is_small = -(size < bits_of(0x1p-6f));  // all bits, or none
  const int32_t code = (small & is_small) | (normal & ~is_small);
  return static_cast<uint8_t>((bits_of(x) >> 24 & 0x80) | code);
}

}  // namespace tandem::cpu
