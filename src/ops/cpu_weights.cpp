#include "ops/cpu_weights.h"

#include <cstring>

namespace tandem {

int64_t CpuWeights::packed_bytes(const QuantView& stored) {
  return Arena::padded_bytes(stored.q.rows * stored.q.cols * size_of(stored.q.dtype)) +
         Arena::padded_bytes(stored.scale.rows * stored.scale.cols * size_of(DType::kF32));
}

QuantView CpuWeights::reserve(const QuantView& stored) {
  QuantView packed = stored;
  packed.q = arena_.matrix(stored.q.rows, stored.q.cols, stored.q.dtype);
  if (stored.scale.empty()) return packed;
  packed.scale = arena_.matrix(stored.scale.rows, stored.scale.cols, DType::kF32);
  std::memcpy(packed.scale.data, stored.scale.data, stored.scale.rows * stored.scale.row_bytes());
  return packed;
}

void CpuWeights::pack(const void* rows, const QuantView& packed, int64_t first_row,
                      int64_t n_rows) const {
  kernels_.pack({.from = rows,
                 .to = packed.q.data,
                 .first_row = first_row,
                 .n_rows = n_rows,
                 .cols = packed.q.cols,
                 .element_bytes = static_cast<int>(size_of(packed.q.dtype))});
}

int64_t CpuWeights::vector_bytes(const QuantView& stored) {
  return Arena::padded_bytes(stored.q.cols * size_of(DType::kF32));
}

QuantView CpuWeights::keep_vector(const QuantView& stored) {
  const TensorView kept = arena_.matrix(1, stored.q.cols, DType::kF32);
  kernels_.decode({stored.q.data, kernel_type(stored.q.dtype), kept.row<float>(0), stored.q.cols});
  return {.q = kept, .scale = {}};
}

cpu::WeightType kernel_type(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return cpu::WeightType::kF32;
    case DType::kF16:
      return cpu::WeightType::kF16;
    case DType::kBF16:
      return cpu::WeightType::kBF16;
    case DType::kF8E4M3:
      return cpu::WeightType::kF8E4M3;
    case DType::kI32:
    case DType::kI64:
      break;
  }
  check(false, "integers are no weights");
  return {};
}

cpu::Weight kernel_weight(const QuantView& w) {
  return {.data = w.q.data,
          .stride = w.q.stride,
          .type = kernel_type(w.q.dtype),
          .scales = static_cast<const float*>(w.scale.data),
          .scale_stride = w.scale.stride,
          .block_rows = w.block_rows,
          .block_cols = w.block_cols,
          .row0 = w.row0,
          .col0 = w.col0};
}

}  // namespace tandem
