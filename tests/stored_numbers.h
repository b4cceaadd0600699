// The numbers of weights as checkpoints store them, in double precision, from the definitions of
// the formats: what kernels and conversions are compared with.
#pragma once
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "core/tensor.h"

namespace tandem::test {

constexpr double kEps = 0x1p-24;  // the largest relative error of rounding to float

using Vec = std::vector<double>;

inline double e4m3(uint8_t code) {
  const int e = code >> 3 & 15, m = code & 7;
  const double magnitude = e == 0 ? m / 512.0 : (1 + m / 8.0) * std::pow(2.0, e - 7);
  return code & 0x80 ? -magnitude : magnitude;
}

inline double number(const TensorView& t, int64_t r, int64_t c) {
  if (t.dtype == DType::kI4Words) {  // the first number is the low half of the first byte
    const int pair = static_cast<int>(t.row_data(r)[c / 2]);
    return (c % 2 == 0 ? pair & 15 : pair >> 4) - 8;
  }
  const std::byte* at = t.row_data(r) + c * size_of(t.dtype);
  if (t.dtype == DType::kF8E4M3) return e4m3(static_cast<uint8_t>(*at));
  if (t.dtype == DType::kF32) {
    float value;
    std::memcpy(&value, at, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, at, 2);
  if (t.dtype == DType::kBF16) return std::bit_cast<float>(uint32_t{bits} << 16);
  const int e = bits >> 10 & 31, m = bits & 1023;  // F16
  const double magnitude =
      e == 0 ? m * std::pow(2.0, -24) : (1 + m / 1024.0) * std::pow(2.0, e - 15);
  return bits & 0x8000 ? -magnitude : magnitude;
}

inline double value(const QuantView& w, int64_t r, int64_t c) {
  const double q = number(w.q, r, c);
  return w.scale.empty()
             ? q
             : q * number(w.scale, (w.row0 + r) / w.block_rows, (w.col0 + c) / w.block_cols);
}

}  // namespace tandem::test
