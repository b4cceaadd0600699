// Converts weights on the GPU from the panels of the CPU kernels (cpu_kernels/kernels.h, Layout) to
// rows.
#pragma once
#include "gpu_kernels/launch_shape.h"
#include "gpu_kernels/numbers.h"

namespace tandem::gpu {

struct UnpackArgs {
  const uint8_t* panels;  // [rows, cols] packed, panel_bytes apart, 16-byte aligned
  int64_t panel_bytes;
  Number type;   // kBF16 or kF8E4M3
  uint8_t* out;  // the rows, row_bytes apart, 16-byte aligned
  int64_t row_bytes;
  int rows;
  // Bytes written per row, a multiple of 16: its numbers, and padding as far as the panel has it.
  int bytes;
};
void unpack_panels(const Stream& stream, const UnpackArgs& args);

}  // namespace tandem::gpu
