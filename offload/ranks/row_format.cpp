#include "offload/ranks/row_format.h"

#include <cstring>

namespace tandem {

void RowCodec::encode(const float* row, std::byte* out) const {
  if (format_ == RowFormat::kF32) std::memcpy(out, row, 4 * dim_);
  if (format_ == RowFormat::kBf16)
    kernels_.encode_bf16({row, reinterpret_cast<cpu::bf16*>(out), dim_});
  if (format_ == RowFormat::kFp8)
    kernels_.encode_fp8({row, reinterpret_cast<uint8_t*>(out),
                         reinterpret_cast<float*>(out + row_scales_begin(dim_)), dim_});
}

void RowCodec::decode(const std::byte* encoded, float* out) const {
  if (format_ == RowFormat::kF32) std::memcpy(out, encoded, 4 * dim_);
  if (format_ == RowFormat::kBf16) kernels_.decode({encoded, cpu::WeightType::kBF16, out, dim_});
  if (format_ == RowFormat::kFp8)
    kernels_.decode_fp8({reinterpret_cast<const uint8_t*>(encoded),
                         reinterpret_cast<const float*>(encoded + row_scales_begin(dim_)), out,
                         dim_});
}

}  // namespace tandem
