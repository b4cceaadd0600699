#include "ops/cpu_weights.h"

#include <cstring>

namespace tandem {

namespace {

// What the arena keeps of a matrix: its rows, or its panels.
struct Shape {
  int64_t rows, cols;
};

Shape packed_shape(cpu::Layout layout, const TensorView& q) {
  if (layout == cpu::Layout::kRows) return {q.rows, q.cols};
  const int64_t n_panels = (q.rows + cpu::kPanelRows - 1) / cpu::kPanelRows;
  return {n_panels, cpu::panel_bytes(kernel_type(q.dtype), q.cols) / size_of(q.dtype)};
}

}  // namespace

int64_t CpuWeights::packed_bytes(const QuantView& stored) const {
  const Shape shape = packed_shape(kernels_.layout, stored.q);
  return Arena::padded_bytes(shape.rows * shape.cols * size_of(stored.q.dtype)) +
         Arena::padded_bytes(stored.scale.rows * stored.scale.cols * size_of(DType::kF32));
}

QuantView CpuWeights::reserve(const QuantView& stored) {
  QuantView packed = stored;
  const Shape shape = packed_shape(kernels_.layout, stored.q);
  packed.q = arena_.matrix(shape.rows, shape.cols, stored.q.dtype);
  packed.q.rows = stored.q.rows;  // the stride says how far a row, or a panel, is from the next
  packed.q.cols = stored.q.cols;
  const int columns = cpu::columns_of_step(kernel_type(stored.q.dtype));
  require(stored.scale.empty() || (stored.block_cols % columns == 0 && stored.col0 % columns == 0),
          "weights with scales for blocks of {} columns: must be a multiple of {}",
          stored.block_cols, columns);
  if (stored.scale.empty()) return packed;
  packed.scale = arena_.matrix(stored.scale.rows, stored.scale.cols, DType::kF32);
  std::memcpy(packed.scale.data, stored.scale.data, stored.scale.rows * stored.scale.row_bytes());
  return packed;
}

void CpuWeights::pack(const void* rows, const QuantView& packed, int64_t first_row,
                      int64_t n_rows) const {
  kernels_.pack({.from = rows,
                 .to = packed.q.data,
                 .type = kernel_type(packed.q.dtype),
                 .first_row = first_row,
                 .n_rows = n_rows,
                 .cols = packed.q.cols});
}

int64_t CpuWeights::table_bytes(const QuantView& stored) {
  return Arena::padded_bytes(stored.q.rows * stored.q.cols * size_of(stored.q.dtype));
}

QuantView CpuWeights::reserve_table(const QuantView& stored) {
  return {.q = arena_.matrix(stored.q.rows, stored.q.cols, stored.q.dtype), .scale = {}};
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
          .stride = w.q.row_bytes(),
          .type = kernel_type(w.q.dtype),
          .scales = static_cast<const float*>(w.scale.data),
          .scale_stride = w.scale.stride,
          .n_scale_rows = w.scale.rows,
          .block_rows = w.block_rows,
          .block_cols = w.block_cols,
          .row0 = w.row0,
          .col0 = w.col0};
}

}  // namespace tandem
