// A weight matrix on the card, and how one of its numbers is decoded.
#pragma once
#include "gpu_kernels/numbers.h"

namespace tandem::gpu {

// A weight matrix, row-major. Rows begin at multiples of 16 bytes, and what lies between the last
// column and the next multiple of 16 bytes is zero. FP8 has scales:
// value[r][c] = data[r * stride + c] * scale[(row0 + r) / block_rows * scale_stride + c /
// block_cols]
struct Weight {
  const void* data;  // [rows, cols]
  int64_t stride;    // numbers from row to row
  Number type;
  int rows, cols;
  const float* scale = nullptr;
  int64_t scale_stride = 0;
  int block_rows = 128, block_cols = 128;
  int row0 = 0;
};

}  // namespace tandem::gpu
