// Rows of FP8 with scales on the GPU, their values, and the error bound of a sum of their products.
#pragma once
#include <gtest/gtest.h>

#include <cmath>

#include "gpu_kernels/products/products.h"
#include "tests/gpu_buffers.h"

namespace tandem::gpu::test {

struct Fp8Numbers {
  std::vector<fp8_e4m3> codes;
  std::vector<float> scales;
  int64_t stride, scale_stride;
  double at(int64_t row, int64_t col) const {
    return double{widen(codes[row * stride + col])} * scales[row * scale_stride + col / kFp8Block];
  }
};

// Filled with NaN. `pad` columns and one scale after each row are never written.
class Fp8RowsOnGpu {
 public:
  Fp8RowsOnGpu(int64_t n_rows, int cols, int64_t pad)
      : cols_(cols),
        stride_(product_stride(cols) + pad),
        scale_stride_((cols + kFp8Block - 1) / kFp8Block + 1),
        codes_(n_rows * stride_),
        scales_(n_rows * scale_stride_) {}
  Fp8Rows view() const { return {codes_.data(), scales_.data(), stride_, scale_stride_}; }
  Fp8Numbers values(Stream& stream) const {
    return {codes_.values(stream), scales_.values(stream), stride_, scale_stride_};
  }

 private:
  int cols_;
  int64_t stride_, scale_stride_;
  OnGpuBuffer<fp8_e4m3> codes_;
  OnGpuBuffer<float> scales_;
};

// The code nearest to v; of two equally near codes the even one.
inline fp8_e4m3 nearest_e4m3(float v) {
  const uint8_t sign = std::signbit(v) ? 0x80 : 0;
  uint8_t best = 0;
  for (uint8_t code = 0; code < 0x7f; ++code) {
    const float off = std::abs(widen(fp8_e4m3{code}) - std::abs(v));
    const float least = std::abs(widen(fp8_e4m3{best}) - std::abs(v));
    if (off < least || (off == least && code % 2 == 0)) best = code;
  }
  return {static_cast<uint8_t>(best | sign)};
}

// Error bound relative to the sum of magnitudes of n products. Four mma sum a block: a real GPU may
// truncate every product 13 bits below the largest one's leading bit, an emulated one rounds as
// floats do. Blocks are scaled twice and added in float.
inline double fp8_sum_error(int n) {
  static const bool emulated = open_gpu().emulated;  // asking takes a real GPU milliseconds
  const double of_block = emulated ? 128 * 0x1p-24 : 16 * 0x1p-13;
  return of_block + (static_cast<double>(n) / kFp8Block + 4) * 0x1p-23;
}

}  // namespace tandem::gpu::test
