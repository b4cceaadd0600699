#include "offload/ranks/row_format.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "core/rounding.h"
#include "cpu_kernels/e4m3.h"

namespace tandem {
namespace {

constexpr int64_t kBlock = 128;  // columns with one scale
constexpr float kLargest = 448;  // of E4M3

// Sizes of floats compare as their bits do.
int32_t size_bits(float x) { return std::bit_cast<int32_t>(x) & 0x7fffffff; }

}  // namespace

int64_t encoded_bytes(RowFormat format, int64_t dim) {
  if (format == RowFormat::kF32) return 4 * dim;
  if (format == RowFormat::kBf16) return round_up(2 * dim, 4);
  return round_up(dim, 4) + 4 * ceil_div(dim, kBlock);
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
    int32_t size = 0;
    for (int64_t c = begin; c < end; ++c) size = std::max(size, size_bits(row[c]));
    const auto largest = std::bit_cast<float>(size);  // NaN if one is
    const float inverse = largest > 0 ? kLargest / largest : 0;
    for (int64_t c = begin; c < end; ++c) codes[c] = cpu::to_e4m3(row[c] * inverse);
    scales[begin / kBlock] = largest / kLargest;
  }
}

void RowCodec::decode_fp8(const std::byte* encoded, float* out) const {
  const auto* const scales = reinterpret_cast<const float*>(encoded + round_up(dim_, 4));
  kernels_.decode({encoded, cpu::WeightType::kF8E4M3, out, dim_});
  for (int64_t begin = 0; begin < dim_; begin += kBlock) {
    const float scale = scales[begin / kBlock];
    for (int64_t c = begin; c < std::min(begin + kBlock, dim_); ++c) out[c] *= scale;
  }
}

}  // namespace tandem
