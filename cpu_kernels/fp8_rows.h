// Rows of FP8 block by block (kernels.h, EncodeFp8Args), for the files of each instruction set.
#pragma once
#include "cpu_kernels/kernels.h"

namespace tandem::cpu {
namespace {

constexpr int bits_of(float v) { return __builtin_bit_cast(int, v); }

// A size s of at most 448 becomes a code by one addition. p is the power of two at or below s, or
// 2^-6 if that is larger: codes near s are multiples of p / 8. In the float s + 2^20 p the last
// bits are that multiple, rounded to even, from 0 to 16; the upper bits are the exponent of p + 20,
// with the bias 127 where codes have 7. Together they are the code + kCodeOffset.
constexpr int kCodeOffset = (20 + 127 - 6) << 3;

// largest_of(from) is the largest size of a block, and encode_block(from, inverse, codes) encodes
// one. The core looks for the next block's largest size while it divides.
template <auto largest_of, auto encode_block>
void encode_blocks(const EncodeFp8Args& a) {
  const int64_t n_whole = a.n / kScaledColumns;
  float largest = n_whole > 0 ? largest_of(a.from) : 0;
  for (int64_t b = 0; b < n_whole; ++b) {
    const float* const from = a.from + b * kScaledColumns;
    const float next = b + 1 < n_whole ? largest_of(from + kScaledColumns) : 0;
    a.scales[b] = largest / 448;
    encode_block(from, largest > 0 ? 448 / largest : 0, a.codes + b * kScaledColumns);
    largest = next;
  }
  const int64_t done = n_whole * kScaledColumns;
  if (done == a.n) return;
  // Zeros after the last column change no scale.
  float from[kScaledColumns] = {};
  uint8_t codes[kScaledColumns];
  __builtin_memcpy(from, a.from + done, (a.n - done) * sizeof(float));
  encode_blocks<largest_of, encode_block>({from, codes, a.scales + n_whole, kScaledColumns});
  __builtin_memcpy(a.codes + done, codes, a.n - done);
}

// decode_block(codes, scale, to) decodes kScaledColumns columns.
template <auto decode_block>
void decode_blocks(const DecodeFp8Args& a) {
  int64_t c = 0;
  for (; c + kScaledColumns <= a.n; c += kScaledColumns)
    decode_block(a.codes + c, a.scales[c / kScaledColumns], a.to + c);
  if (c == a.n) return;
  uint8_t codes[kScaledColumns] = {};
  float to[kScaledColumns];
  __builtin_memcpy(codes, a.codes + c, a.n - c);
  decode_block(codes, a.scales[c / kScaledColumns], to);
  __builtin_memcpy(a.to + c, to, (a.n - c) * sizeof(float));
}

}  // namespace
}  // namespace tandem::cpu
