// A weight matrix on the GPU.
#pragma once
#include "gpu_kernels/numbers.h"

namespace tandem::gpu {

// A row-major weight matrix. Rows begin at multiples of 16 bytes; padding between the last column
// and the next multiple of 16 bytes is zero. FP8 has scales: value[r][c] = data[r * stride + c] *
// scale[(row0 + r) / block_rows * scale_stride + c / block_cols].
struct Weight {
  const void* data;  // [rows, cols]
  int64_t stride;    // elements from row to row
  Number type;
  int rows, cols;
  const float* scale = nullptr;
  int64_t scale_stride = 0;
  int block_rows = 128, block_cols = 128;
  int row0 = 0;
};

}  // namespace tandem::gpu
