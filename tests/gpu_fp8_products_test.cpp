// Activations in FP8: their rounding, and their products with FP8 weights against double precision
// of the same rounded numbers.
#include "gpu_kernels/products/products.h"
#include "tests/check_close.h"
#include "tests/gpu_fp8_rows.h"
#include "tests/gpu_weights.h"

namespace tandem::gpu::test {
namespace {

using tandem::test::expect_close;

class GpuFp8Products : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!open_gpu().fp8_mma) GTEST_SKIP() << "no FP8 mma";
  }
  void round(const std::vector<float>& x, int64_t n_rows, int cols, int64_t x_stride);
  void matrix(int n_tokens, WeightCase c, int n_multiprocessors, float x_deviation = 1);

  Stream stream_;
  std::mt19937 rng_{23};
};

void GpuFp8Products::round(const std::vector<float>& x, int64_t n_rows, int cols,
                           int64_t x_stride) {
  SCOPED_TRACE(testing::Message() << n_rows << " rows of " << cols);
  const OnGpuBuffer<float> on_gpu(stream_, x);
  const Fp8RowsOnGpu rows(n_rows + 2, cols, 16);
  round_rows_fp8(stream_, {.x = on_gpu.data(),
                           .out = rows.view(),
                           .x_stride = x_stride,
                           .n_rows = n_rows,
                           .cols = cols});
  const Fp8Numbers got = rows.values(stream_);
  for (int64_t r = 0; r < n_rows + 2; ++r)
    for (int64_t c = 0; c < got.stride; c += kFp8Block) {
      const int64_t end = std::min<int64_t>(c + kFp8Block, cols);
      const float scale = got.scales[r * got.scale_stride + c / kFp8Block];
      if (r >= n_rows || c >= cols) {
        EXPECT_TRUE(std::isnan(scale)) << "written at " << r << ", " << c;
        continue;
      }
      float largest = 0;
      for (int64_t i = c; i < end; ++i) largest = std::max(largest, std::abs(x[r * x_stride + i]));
      EXPECT_EQ(scale, largest > 0 ? largest / 448 : 1) << r << ", " << c;
      for (int64_t i = c; i < std::min(c + kFp8Block, got.stride); ++i) {
        const uint8_t code = got.codes[r * got.stride + i].bits;
        if (i < cols)
          ASSERT_EQ(code, nearest_e4m3(x[r * x_stride + i] / scale).bits) << r << ", " << i;
        else
          ASSERT_EQ(code, i < product_stride(cols) ? 0 : 0xff) << r << ", " << i;
      }
    }
}

// Covers every binade of floats from those with subnormal scales on, a block of zeros, NaN between
// rows, and rows that begin at any multiple of 4 bytes.
TEST_F(GpuFp8Products, RowsAreRoundedToTheNearest) {
  for (const auto& [n_rows, cols, pad] :
       {std::tuple{5, 19, 2}, {3, 128, 0}, {2, 129, 3}, {9, 300, 4}, {1, 1, 7}, {2, 640, 0}}) {
    Rows x(rng_, n_rows, cols, 1, pad);
    for (float& v : x.values)
      if (!std::isnan(v)) v = std::ldexp(v, static_cast<int>(rng_() % 12));
    for (int r = 0; r < n_rows; ++r)
      for (int c = 0; c < cols; ++c) x.values[r * x.stride + c] *= std::ldexp(1.f, 20 * r - 60);
    std::fill_n(x.values.begin(), std::min(cols, 128), 0.f);
    round(x.values, n_rows, cols, x.stride);
  }
}

TEST_F(GpuFp8Products, WhatIsNotFiniteStaysSo) {
  for (const float bad : {NAN, INFINITY, -INFINITY}) {
    std::vector<float> x(2 * 300, 1);
    x[130] = bad;
    const OnGpuBuffer<float> on_gpu(stream_, x);
    const Fp8RowsOnGpu rows(2, 300, 0);
    round_rows_fp8(stream_, {on_gpu.data(), rows.view(), 300, 2, 300});
    const Fp8Numbers got = rows.values(stream_);
    for (int i = 0; i < 600; ++i)
      EXPECT_EQ(std::isfinite(got.at(i / 300, i % 300)), i < 128 || i >= 256) << i;
  }
}

// The smallest subnormal floats must not become NaN codes, whatever the division gives.
TEST_F(GpuFp8Products, TheSmallestNumbersAreNumbers) {
  std::vector<float> x(128, 0);
  x[0] = 1e-45f, x[5] = -1e-45f;
  const OnGpuBuffer<float> on_gpu(stream_, x);
  const Fp8RowsOnGpu rows(1, 128, 0);
  round_rows_fp8(stream_, {on_gpu.data(), rows.view(), 128, 1, 128});
  const Fp8Numbers got = rows.values(stream_);
  for (int i = 0; i < 128; ++i) EXPECT_LE(std::abs(got.at(0, i)), 1e-42) << i;
}

void GpuFp8Products::matrix(int n_tokens, WeightCase c, int n_multiprocessors, float x_deviation) {
  SCOPED_TRACE(testing::Message() << n_tokens << " tokens, " << c.rows << " x " << c.cols);
  c.type = Number::kF8E4M3;
  const RandomWeight w(stream_, rng_, c);
  Rows x(rng_, n_tokens, c.cols, x_deviation, 1);
  for (int t = 0; t < n_tokens; ++t)  // scales of rows and blocks differ much
    for (int i = 0; i < c.cols; ++i)
      x.values[t * x.stride + i] *= std::ldexp(1.f, (t * 5 + i / kFp8Block * 3) % 11 - 5);
  const OnGpuBuffer<float> x_on_gpu(stream_, x.values);
  const Fp8RowsOnGpu rows(n_tokens, c.cols, 16);
  round_rows_fp8(stream_, {.x = x_on_gpu.data(),
                           .out = rows.view(),
                           .x_stride = x.stride,
                           .n_rows = n_tokens,
                           .cols = c.cols});
  const Fp8Numbers rounded = rows.values(stream_);
  std::vector<double> want, bound;
  for (int t = 0; t < n_tokens; ++t)
    for (int r = 0; r < c.rows; ++r) {
      double sum = 0, magnitude = 0;
      for (int i = 0; i < c.cols; ++i) {
        const double product = rounded.at(t, i) * w.at(r, i);
        sum += product;
        magnitude += std::abs(product);
      }
      want.push_back(sum);
      bound.push_back(magnitude * fp8_sum_error(c.cols) + 1e-37);
    }
  const int64_t out_stride = c.rows + 1;
  const OnGpuBuffer<float> partial(matrix_partials(w.view(), n_tokens, n_multiprocessors) + 1);
  const OnGpuBuffer<uint32_t> counters(stream_, std::vector<uint32_t>(kCounters, 0));
  for (int run = 0; run < 2; ++run) {
    const OnGpuBuffer<float> out(n_tokens * out_stride);
    matrix_product(stream_, {.x = nullptr,
                             .x_fp8 = rows.view(),
                             .w = w.view(),
                             .out = out.data(),
                             .x_stride = 0,
                             .out_stride = out_stride,
                             .n_tokens = n_tokens,
                             .workspace = {partial.data(), counters.data()},
                             .n_multiprocessors = n_multiprocessors});
    const std::vector<float> all = out.values(stream_);
    std::vector<float> got;
    for (int64_t i = 0; i < std::ssize(all); ++i)
      if (i % out_stride < c.rows)
        got.push_back(all[i]);
      else
        EXPECT_TRUE(std::isnan(all[i])) << "written at " << i / out_stride;
    expect_close(got, want, bound);
  }
}

TEST_F(GpuFp8Products, Matrix) {
  matrix(17, {.rows = 130, .cols = 300, .type = {}, .row0 = 100}, 1);
  matrix(33, {.rows = 72, .cols = 136, .type = {}, .row0 = 3}, 1);
  matrix(130, {.rows = 129, .cols = 393, .type = {}}, 1);
  matrix(18, {.rows = 24, .cols = 15, .type = {}}, 1);
}
// The columns are shared by blocks that begin within blocks of scales.
TEST_F(GpuFp8Products, MatrixWithSharedColumns) {
  matrix(129, {.rows = 136, .cols = 1100, .type = {}}, 12);
  matrix(20, {.rows = 40, .cols = 1700, .type = {}}, 3);
}
TEST_F(GpuFp8Products, ExtremeScales) {
  matrix(18, {.rows = 24, .cols = 130, .type = {}, .scale = 1e30f}, 1, 1e-30f);
  matrix(18, {.rows = 24, .cols = 130, .type = {}, .scale = 1e-30f}, 1, 1e30f);
}

}  // namespace
}  // namespace tandem::gpu::test
