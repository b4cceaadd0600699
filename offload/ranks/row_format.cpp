#include "offload/ranks/row_format.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/rounding.h"

namespace tandem {
namespace {

constexpr int64_t kBlock = 128;  // columns with one scale
constexpr float kLargest = 448;  // of E4M3

// The nearest code, ties to even, saturating. Without branches, so that the compiler computes
// several columns at a time.
uint8_t to_e4m3(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  const float size = std::fabs(x) < kLargest ? std::fabs(x) : kLargest;
  // From 2^-6 on: three bits of the fraction stay, and the exponent's bias changes from 127 to 7.
  const auto exact = std::bit_cast<uint32_t>(size);
  const uint32_t normal = ((exact + 0x7ffff + (exact >> 20 & 1)) >> 20) - ((127 - 7) << 3);
  // Below, codes are multiples of 2^-9, to which the addition of 2^14 rounds.
  const uint32_t small = std::bit_cast<uint32_t>(size + 0x1p14f) - std::bit_cast<uint32_t>(0x1p14f);
  const uint32_t code = size < 0x1p-6f ? small : normal;
  return static_cast<uint8_t>((bits >> 24 & 0x80) | code);
}

}  // namespace

int64_t RowCodec::bytes() const {
  if (format_ == RowFormat::kF32) return 4 * dim_;
  if (format_ == RowFormat::kBf16) return round_up(2 * dim_, 4);
  return round_up(dim_, 4) + 4 * ceil_div(dim_, kBlock);
}

void RowCodec::encode(const float* row, std::byte* out) const {
  if (format_ == RowFormat::kF32) std::memcpy(out, row, 4 * dim_);
  if (format_ == RowFormat::kBf16)
    kernels_.encode_bf16({row, reinterpret_cast<cpu::bf16*>(out), dim_});
  if (format_ == RowFormat::kFp8) encode_fp8(row, out);
}

void RowCodec::decode(const std::byte* encoded, float* out) const {
  if (format_ == RowFormat::kF32) std::memcpy(out, encoded, 4 * dim_);
  if (format_ == RowFormat::kBf16) kernels_.decode({encoded, cpu::WeightType::kBF16, out, dim_});
  if (format_ == RowFormat::kFp8) decode_fp8(encoded, out);
}

// The codes of all columns, then the scales. The kernels do not decode NaN, so the scale of a block
// with a NaN is NaN.
void RowCodec::encode_fp8(const float* row, std::byte* out) const {
  auto* const codes = reinterpret_cast<uint8_t*>(out);
  auto* const scales = reinterpret_cast<float*>(out + round_up(dim_, 4));
  for (int64_t begin = 0; begin < dim_; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, dim_);
    float largest = 0;
    bool nan = false;
    for (int64_t c = begin; c < end; ++c) {
      largest = std::max(largest, std::fabs(row[c]));
      nan |= row[c] != row[c];
    }
    const float inverse = largest > 0 ? kLargest / largest : 0;
    for (int64_t c = begin; c < end; ++c) codes[c] = to_e4m3(row[c] * inverse);
    scales[begin / kBlock] = nan ? std::numeric_limits<float>::quiet_NaN() : largest / kLargest;
  }
}

void RowCodec::decode_fp8(const std::byte* encoded, float* out) const {
  const auto* const scales = reinterpret_cast<const float*>(encoded + round_up(dim_, 4));
  kernels_.decode({encoded, cpu::WeightType::kF8E4M3, out, dim_});
  for (int64_t c = 0; c < dim_; ++c) out[c] *= scales[c / kBlock];
}

}  // namespace tandem
