// The library that products are compared with: cuBLAS where there is a GPU and it is installed, and
// a slow replacement where the GPU is emulated.
#include <gtest/gtest.h>

#include <random>

#include "core/run_error.h"
#include "tests/gpu_memory.h"
#include "with_gpu/cublas.h"

namespace tandem {
namespace {

constexpr const char* kFake = TANDEM_FAKE_CUBLAS;  // empty: the real library

std::unique_ptr<Cublas> open_library(gpu::Stream& stream, std::string& why_not) {
  const bool real = *kFake == 0;
  return Cublas::open(real ? Cublas::usual_names() : std::span(&kFake, 1), stream.handle(),
                      why_not);
}

// Small integers, for which every order of the sum gives the same bits.
std::vector<bf16> numbers(int64_t n, int seed) {
  std::mt19937 rng(seed);
  std::vector<bf16> all(n);
  for (bf16& v : all) v = narrow(static_cast<float>(rng() % 5) - 2);
  return all;
}

TEST(CublasLibrary, MultipliesRowsByTransposedWeights) {
  gpu::Stream stream;
  std::string why_not;
  const std::unique_ptr<Cublas> blas = open_library(stream, why_not);
  if (!blas && *kFake == 0) GTEST_SKIP() << "cuBLAS: " << why_not;
  ASSERT_TRUE(blas) << why_not;
  EXPECT_GE(blas->version(), 110000);

  constexpr int kN = 6, kRows = 24, kCols = 16;
  constexpr int64_t kXStride = 16, kWStride = 32, kOutStride = 40;
  const std::vector<bf16> x = numbers(kN * kXStride, 1), w = numbers(kRows * kWStride, 2);
  const gpu::Buffer x_there = gpu::on_gpu(stream, x), w_there = gpu::on_gpu(stream, w);
  const gpu::Buffer out = gpu::nans_on_gpu<bf16>(kN * kOutStride);
  const auto multiply = [&] {
    blas->multiply({.x = x_there.as<bf16>(),
                    .w = w_there.as<bf16>(),
                    .out = out.as<bf16>(),
                    .x_stride = kXStride,
                    .w_stride = kWStride,
                    .out_stride = kOutStride,
                    .n = kN,
                    .rows = kRows,
                    .cols = kCols});
  };
  // Memory of the emulated GPU can only be accessed while its stream works.
  stream.handle() ? multiply() : stream.run_on_host(multiply);
  const std::vector<bf16> got = gpu::from_gpu<bf16>(stream, out);
  for (int t = 0; t < kN; ++t)
    for (int r = 0; r < kOutStride; ++r) {
      float want = 0;
      for (int i = 0; i < kCols; ++i)
        want += widen(x[t * kXStride + i]) * widen(w[r % kRows * kWStride + i]);
      const float value = widen(got[t * kOutStride + r]);
      if (r < kRows)
        EXPECT_EQ(value, want) << t << ", " << r;
      else
        EXPECT_TRUE(std::isnan(value)) << "written between rows: " << t << ", " << r;
    }
}

TEST(CublasLibrary, RefusalsAreReported) {
  gpu::Stream stream;
  std::string why_not;
  const std::unique_ptr<Cublas> blas = open_library(stream, why_not);
  if (!blas && *kFake == 0) GTEST_SKIP() << "cuBLAS: " << why_not;
  ASSERT_TRUE(blas) << why_not;
  BlasProduct overlapping = {};
  overlapping.x_stride = 8;
  overlapping.w_stride = 16;
  overlapping.out_stride = overlapping.rows = 4;
  overlapping.n = 1;
  overlapping.cols = 16;
  EXPECT_THROW(blas->multiply(overlapping), Error);
}

TEST(CublasLibrary, AMissingLibraryIsReported) {
  std::string why_not;
  constexpr const char* kNames[] = {"libno-such-library.so.13", "libno-such-library.so.12"};
  EXPECT_FALSE(Cublas::open(kNames, nullptr, why_not));
  EXPECT_EQ(why_not, "not installed");
  constexpr const char* kOther[] = {"libc.so.6"};
  EXPECT_FALSE(Cublas::open(kOther, nullptr, why_not));
  EXPECT_EQ(why_not, "without the functions that are needed");
}

}  // namespace
}  // namespace tandem
