// The library that products are compared with: cuBLAS where there is a GPU and it is installed, and
// slow replacements where the GPU is emulated, of which one has no grouped products.
#include <gtest/gtest.h>

#include <functional>
#include <random>

#include "bench/gpu/gpu_benches.h"
#include "core/run_error.h"
#include "gpu_kernels/products/products.h"
#include "tests/gpu_memory.h"
#include "tests/small_config.h"
#include "with_gpu/cublas.h"

namespace tandem {
namespace {

constexpr const char* kFake = TANDEM_FAKE_CUBLAS;           // empty: the real library
constexpr const char* kFake12_4 = TANDEM_FAKE_CUBLAS_12_4;  // without grouped products

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

// Memory of the emulated GPU can only be accessed while its stream works.
void call(gpu::Stream& stream, const std::function<void()>& library) {
  stream.handle() ? library() : stream.run_on_host(library);
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
  call(stream, multiply);
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

// Experts without rows, with one and with many, in one call, against the engine's grouped product.
TEST(CublasLibrary, MultipliesGroupsAsTheEngineDoes) {
  gpu::Stream stream;
  std::string why_not;
  const std::unique_ptr<Cublas> blas = open_library(stream, why_not);
  if (!blas && *kFake == 0) GTEST_SKIP() << "cuBLAS: " << why_not;
  ASSERT_TRUE(blas) << why_not;
  if (!blas->has_groups() && *kFake == 0) GTEST_SKIP() << "cuBLAS before 12.5";
  ASSERT_TRUE(blas->has_groups());

  constexpr int kCounts[] = {0, 1, 70, 0, 3, 0}, kExperts = std::size(kCounts);
  constexpr int kRows = 40, kCols = 48, kWStride = 56, kOutStride = 64;
  std::vector<int32_t> offsets = {0};
  for (const int n : kCounts) offsets.push_back(offsets.back() + n);
  const int n_rows = offsets.back();
  const std::vector<bf16> x = numbers(int64_t{n_rows} * kCols, 1),
                          w = numbers(int64_t{kExperts} * kRows * kWStride, 2);
  std::vector<bf16> hidden(x.size());  // in the order in which the engine's kernel reads columns
  for (int r = 0; r < n_rows; ++r)
    for (int c = 0; c < kCols; ++c) hidden[r * kCols + gpu::product_column(c)] = x[r * kCols + c];
  const gpu::Buffer x_there = gpu::on_gpu(stream, x), w_there = gpu::on_gpu(stream, w);
  const gpu::Buffer hidden_there = gpu::on_gpu(stream, hidden),
                    offsets_there = gpu::on_gpu(stream, offsets);
  // A row more than there are, which must stay as it is.
  const gpu::Buffer out = gpu::nans_on_gpu<bf16>((n_rows + 1) * kOutStride),
                    ours = gpu::nans_on_gpu<float>((n_rows + 1) * kOutStride);

  std::vector<BlasProduct> products;
  for (int e = 0; e < kExperts; ++e)
    products.push_back({.x = x_there.as<bf16>() + offsets[e] * kCols,
                        .w = w_there.as<bf16>() + e * kRows * kWStride,
                        .out = out.as<bf16>() + offsets[e] * kOutStride,
                        .x_stride = kCols,
                        .w_stride = kWStride,
                        .out_stride = kOutStride,
                        .n = kCounts[e],
                        .rows = kRows,
                        .cols = kCols});
  const BlasProducts grouped(products, stream);
  call(stream, [&] { blas->multiply(grouped); });
  gpu::grouped_down(
      stream,
      {.hidden = hidden_there.as<bf16>(),
       .rows = {.offsets = offsets_there.as<int32_t>(), .n_experts = kExperts, .max_rows = n_rows},
       .down = {.first = {.data = w_there.as<std::byte>(),
                          .stride = kWStride,
                          .type = Number::kBF16,
                          .rows = kRows,
                          .cols = kCols},
                .weight_stride = kRows * kWStride * int64_t{sizeof(bf16)},
                .scale_stride = 0},
       .out = ours.as<float>(),
       .hidden_stride = kCols,
       .out_stride = kOutStride});
  const std::vector<bf16> got = gpu::from_gpu<bf16>(stream, out);
  const std::vector<float> want = gpu::from_gpu<float>(stream, ours);
  for (int r = 0; r <= n_rows; ++r)
    for (int c = 0; c < kOutStride; ++c) {
      const float value = widen(got[r * kOutStride + c]);
      if (r < n_rows && c < kRows)
        ASSERT_EQ(value, want[r * kOutStride + c]) << r << ", " << c;
      else
        ASSERT_TRUE(std::isnan(value)) << r << ", " << c;
    }
  const BlasProducts none({products.data(), 1}, stream);  // of no rows
  call(stream, [&] { blas->multiply(none); });
  stream.wait();
}

// cuBLAS before 12.5 loses the grouped comparison only, which says so; with 12.5 all are there.
TEST(CublasLibrary, WithoutGroupsOnlyTheirComparisonIsMissing) {
  if (*kFake == 0) GTEST_SKIP() << "needs replacements of cuBLAS";
  ModelConfig config = small_r1();
  config.dim = config.dense_dim = 64;
  using Kind = ManyRowsProduct::Kind;
  const ManyRowsProduct dense = {"dense", Kind::kDense, 32, 64},
                        gate_up = {"gate, up", Kind::kGateUp, 32, 64, 3},
                        down = {"down", Kind::kDown, 64, 32, 3};
  for (const char* const library : {kFake, kFake12_4}) {
    std::string cublas;
    const ProductTimer timer =
        product_timer(config, {DType::kF8E4M3}, cublas, std::span(&library, 1));
    EXPECT_EQ(cublas, "130001");
    for (const ManyRowsProduct& product : {dense, gate_up, down}) {
      const ProductTimes times = timer(product, 17, 1e-3);
      EXPECT_TRUE(times.ours && times.cublas) << product.what;
      const bool has_groups = library == kFake;
      EXPECT_EQ(times.cublas_grouped.has_value(), has_groups && product.kind != Kind::kDense);
      EXPECT_EQ(times.why_not_grouped,
                has_groups || product.kind == Kind::kDense ? "" : "not in 130001");
    }
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
  if (!blas->has_groups()) return;
  std::string refusal;
  const BlasProducts grouped(std::span(&overlapping, 1), stream);
  call(stream, [&] {
    try {
      blas->multiply(grouped);
    } catch (const RunError& e) {
      refusal = e.what();
    }
  });
  stream.wait();
  EXPECT_EQ(refusal.find("cublasGemmGroupedBatchedEx: status "), 0u) << refusal;
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
