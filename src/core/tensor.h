// The types that the whole engine uses: a view of a row-major matrix, and a view of a weight with
// block scales.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "core/check.h"

namespace tandem {

// kI4Words exists in checkpoints only (compressed-tensors, pack_to_int32): 32-bit words of eight
// numbers, each stored plus 8, the first in the lowest bits. kI4 is the kernels' layout of the same
// numbers; kI4TwoLevel is INT4 quantised by this engine (kernels.h).
enum class DType : uint8_t {
  kF32,
  kF16,
  kBF16,
  kF8E4M3,
  kI32,
  kI64,
  kI8,
  kI4,
  kI4TwoLevel,
  kI4Words
};

// Whether the type is one of the 4-bit layouts that kernels compute with.
constexpr bool is_i4(DType t) { return t == DType::kI4 || t == DType::kI4TwoLevel; }

constexpr int64_t size_of(DType t) {
  switch (t) {
    case DType::kI8:
      return 1;
    case DType::kI4:
    case DType::kI4TwoLevel:
    case DType::kI4Words:
      break;
    case DType::kI64:
      return 8;
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kF16:
    case DType::kBF16:
      return 2;
    case DType::kF8E4M3:
      return 1;
  }
  check(false, "numbers of half a byte have no size: see bits_of()");
  return 0;
}

constexpr int64_t bits_of(DType t) { return is_i4(t) || t == DType::kI4Words ? 4 : 8 * size_of(t); }

// The name in safetensors files, "F8_E4M3" or "BF16"; a name of our own for the INT4 layouts.
constexpr std::string_view name_of(DType t) {
  constexpr std::string_view kNames[] = {"F32", "F16", "BF16", "F8_E4M3",      "I32",
                                         "I64", "I8",  "I4",   "I4 two-level", "I4 in I32"};
  return kNames[static_cast<int>(t)];
}

template <class T>
constexpr DType dtype_of() = delete;
template <>
constexpr DType dtype_of<float>() {
  return DType::kF32;
}
template <>
constexpr DType dtype_of<uint16_t>() {  // the bits of a bfloat16
  return DType::kBF16;
}
template <>
constexpr DType dtype_of<int32_t>() {
  return DType::kI32;
}

// A non-owning view, cheap to copy. `stride` is the distance between rows in elements. Per-head
// activations are matrices as well: [tokens * heads, head_dim].
struct TensorView {
  void* data = nullptr;
  int64_t rows = 0, cols = 0, stride = 0;
  DType dtype = DType::kF32;

  bool empty() const { return data == nullptr; }
  int64_t row_bytes() const { return stride * bits_of(dtype) / 8; }
  std::byte* row_data(int64_t r) const { return static_cast<std::byte*>(data) + r * row_bytes(); }

  template <class T>
  T* row(int64_t r) const {
    check(dtype == dtype_of<T>() && r < rows, "TensorView::row");
    return static_cast<T*>(data) + r * stride;
  }
  TensorView rows_from(int64_t first, int64_t count) const {
    check(first >= 0 && count >= 0 && first + count <= rows, "TensorView::rows_from");
    return {row_data(first), count, cols, stride, dtype};
  }
  TensorView cols_from(int64_t first, int64_t count) const {
    check(first >= 0 && count >= 0 && first + count <= cols, "TensorView::cols_from");
    return {static_cast<std::byte*>(data) + first * bits_of(dtype) / 8, rows, count, stride, dtype};
  }
  TensorView reshape(int64_t r, int64_t c) const {
    check(stride == cols && r * c == rows * cols, "TensorView::reshape needs a dense matrix");
    return {data, r, c, c, dtype};
  }
};

// A weight matrix with the scales that decode it (README_WEIGHTS.md of DeepSeek-V3):
// value[r][c] = q[r][c] * scale[(row0 + r) / block_rows][(col0 + c) / block_cols].
// A plain BF16/F16/F32 weight has no scale. INT8 exists only in packed form (CpuWeights). row0 and
// col0 are the position of this view relative to the first scale block.
struct QuantView {
  TensorView q;
  TensorView scale;  // kF32, kBF16 for kI4Words, or empty
  int block_rows = 0, block_cols = 0;
  int row0 = 0, col0 = 0;

  bool empty() const { return q.empty(); }
  // A range of rows or columns, with the scale blocks that overlap it.
  QuantView rows_from(int64_t first, int64_t count) const {
    QuantView part = *this;
    part.q = q.rows_from(first, count);
    if (scale.empty()) return part;
    const int64_t begin = row0 + first, block = begin / block_rows;
    part.scale = scale.rows_from(block, (begin + count - 1) / block_rows + 1 - block);
    part.row0 = static_cast<int>(begin % block_rows);
    return part;
  }
  QuantView cols_from(int64_t first, int64_t count) const {
    QuantView part = *this;
    part.q = q.cols_from(first, count);
    if (scale.empty()) return part;
    const int64_t begin = col0 + first, block = begin / block_cols;
    part.scale = scale.cols_from(block, (begin + count - 1) / block_cols + 1 - block);
    part.col0 = static_cast<int>(begin % block_cols);
    return part;
  }
};

}  // namespace tandem
