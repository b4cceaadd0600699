// Rows of activations as they travel between CPU ranks (core/row_format.h).
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/row_format.h"
#include "cpu_kernels/kernels.h"

namespace tandem {

static_assert(cpu::kScaledColumns == kColumnsOfRowScale);

// As add_rows() takes such rows; not for kFp8.
constexpr cpu::ActivationType type_of(RowFormat format) {
  return format == RowFormat::kF32 ? cpu::ActivationType::kF32 : cpu::ActivationType::kBF16;
}

// Encodes and decodes rows of `dim` columns. The bits of a row depend on the row alone. Rows that
// stay on their rank are encoded as well, so it makes no difference which rank computes a row.
class RowCodec {
 public:
  RowCodec(const cpu::KernelTable& kernels, RowFormat format, int64_t dim)
      : kernels_(kernels), format_(format), dim_(dim) {}
  int64_t bytes() const { return encoded_bytes(format_, dim_); }  // of a row
  void encode(const float* row, std::byte* out) const;            // out: [bytes()], 4-byte aligned
  void decode(const std::byte* encoded, float* out) const;        // encoded: 4-byte aligned

 private:
  const cpu::KernelTable& kernels_;
  const RowFormat format_;
  const int64_t dim_;
};

}  // namespace tandem
