#include "offload/ranks/row_format.h"

#include <cstring>

#include "core/rounding.h"

namespace tandem {
namespace {

// A row of FP8 has the codes of all columns, then the scales.
int64_t scales_begin(int64_t dim) { return round_up(dim, 4); }

}  // namespace

int64_t encoded_bytes(RowFormat format, int64_t dim) {
  if (format == RowFormat::kF32) return 4 * dim;
  if (format == RowFormat::kBf16) return round_up(2 * dim, 4);
  return scales_begin(dim) + 4 * ceil_div(dim, cpu::kScaledColumns);
}

void RowCodec::encode(const float* row, std::byte* out) const {
  if (format_ == RowFormat::kF32) std::memcpy(out, row, 4 * dim_);
  if (format_ == RowFormat::kBf16)
    kernels_.encode_bf16({row, reinterpret_cast<cpu::bf16*>(out), dim_});
  if (format_ == RowFormat::kFp8)
    kernels_.encode_fp8({row, reinterpret_cast<uint8_t*>(out),
                         reinterpret_cast<float*>(out + scales_begin(dim_)), dim_});
}

void RowCodec::decode(const std::byte* encoded, float* out) const {
  if (format_ == RowFormat::kF32) std::memcpy(out, encoded, 4 * dim_);
  if (format_ == RowFormat::kBf16) kernels_.decode({encoded, cpu::WeightType::kBF16, out, dim_});
  if (format_ == RowFormat::kFp8)
    kernels_.decode_fp8({reinterpret_cast<const uint8_t*>(encoded),
                         reinterpret_cast<const float*>(encoded + scales_begin(dim_)), out, dim_});
}

}  // namespace tandem
