// Benchmarks of a GPU's kernels alone, real or emulated: every row has its numbers and names what
// is missing. The values of the times are not tested.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "bench/gpu/gpu_benches.h"
#include "gpu_kernels/runtime.h"
#include "tests/bench_rows.h"
#include "tests/small_config.h"
#include "with_gpu/random_on_gpu.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kRunSeconds = 1e-3;

// Operands for timing: NaN and infinity would hide errors, and large numbers change the clock.
TEST(RandomOnGpu, NumbersAreAtMostOne) {
  gpu::Stream stream;
  constexpr int kNumbers = 5000;
  const gpu::Buffer buffer(kNumbers * 4, gpu::Site::kMapped);
  const auto expect_spread = [&](auto number) {
    double low = 0, high = 0;
    for (int i = 0; i < kNumbers; ++i) {
      const double v = number(i);
      ASSERT_LE(std::abs(v), 1) << i;
      low = std::min(low, v);
      high = std::max(high, v);
    }
    EXPECT_LT(low, -0.9);
    EXPECT_GT(high, 0.9);
  };
  fill_with_random(stream, Number::kF32, buffer);
  expect_spread([&](int i) { return buffer.as<float>()[i]; });
  fill_with_random(stream, Number::kBF16, buffer);
  expect_spread([&](int i) { return widen(buffer.as<bf16>()[i]); });
  fill_with_random(stream, Number::kF8E4M3, buffer);
  expect_spread([&](int i) { return widen(buffer.as<fp8_e4m3>()[i]); });
}

// More than are made at once: they repeat, to the last byte.
TEST(RandomOnGpu, NumbersRepeatToTheLast) {
  gpu::Stream stream;
  constexpr int64_t kMade = (4 << 20) / 4, kNumbers = 2 * kMade + 77;
  const gpu::Buffer buffer(kNumbers * 4, gpu::Site::kMapped);
  fill_with_random(stream, Number::kF32, buffer);
  const auto* const numbers = buffer.as<float>();
  int n_alike = 0;
  for (int64_t i = kMade; i < kNumbers; ++i) ASSERT_EQ(numbers[i], numbers[i - kMade]) << i;
  for (int64_t i = 1; i < kMade; ++i) n_alike += numbers[i] == numbers[i - 1] ? 1 : 0;
  EXPECT_LT(n_alike, 10);
}

class GpuKernelBench : public BenchRows {
 protected:
  static ModelConfig smaller_r1() {
    ModelConfig c = small_r1();
    c.dim = c.dense_dim = 128;
    return c;
  }

  // The GPU reads 1 TB/s and multiplies 1 Top/s.
  BenchInput input(std::vector<int> tokens, DType type = DType::kBF16) const {
    Gpu gpu = {};
    gpu.name = "made up";
    gpu.read_bytes_per_second = gpu.peak.bf16 = 1e12;
    return {.options = {.tokens = std::move(tokens), .seconds = kRunSeconds},
            .config = config_,
            .formats = {{type}, {type}},
            .gpu = gpu};
  }

  const ModelConfig config_ = smaller_r1();
};

TEST_F(GpuKernelBench, SmallKernels) {
  bench_kernels(input({1, 5}), small_kernel_timer(config_, 5, 1 << 20), collect());
  const Benchmark kernels = kernels_benchmark();
  expect_times_on_gpu(2 * static_cast<size_t>(SmallKernel::kKernels));
  for (const Json& row : rows_) {
    const double moving = row["bytes"].get<double>() / 1e12, seconds = row["gpu_seconds"];
    EXPECT_GT(moving, 0);
    EXPECT_DOUBLE_EQ(row["bound_seconds"].get<double>(), moving + 3e-6);
    EXPECT_DOUBLE_EQ(row["ratio"].get<double>(), seconds / (moving + 3e-6));
    EXPECT_EQ(row["within_target"].get<bool>(), seconds <= 1.3 * moving + 3e-6);
    EXPECT_NE((kernels.header(row) + kernels.text(row)).find(row["what"]), std::string::npos);
  }
}

// Half of the memory is for matrices. A kernel is measured if the matrices of one launch fit, and
// not if a float more is needed; nothing behind them is touched, which the emulated GPU notices.
TEST_F(GpuKernelBench, SmallKernelsTakeTheMemoryOfTheirMatrices) {
  if (!gpu::open_gpu().emulated) GTEST_SKIP() << "the memory of a GPU is what it is";
  constexpr int kTokens = 3;
  ModelConfig config = config_;
  config.router.n_experts = 64;
  const std::pair<SmallKernel, int64_t> floats[] = {
      {SmallKernel::kEmbed, 384},           // [3, 128]
      {SmallKernel::kNorm, 3 * 384 + 128},  // two inputs, the gain
      // 4 heads of 48, [3, 144], the gain, rows of a cache
      {SmallKernel::kAppend, 576 + 448 + 128 + 448},
      {SmallKernel::kAppendFp8, 576 + 448 + 128 + 512},  // rows of 656 bytes
      // [3, 128], [64, 128], bias, ids and weights of 4 each, logits
      {SmallKernel::kRoute, 384 + 8192 + 64 + 2 * 64 + 192},
      {SmallKernel::kSortPairs, 128 + 2 * 64},  // 65 offsets, two lists of pairs
      {SmallKernel::kGather, 384 + 384},
      {SmallKernel::kRound, 384 + 192},          // BF16
      {SmallKernel::kCombine, 1536 + 64 + 384},  // [12, 128], weights, sums
      {SmallKernel::kSiluMul, 384 + 384},
      {SmallKernel::kAdd, 384 + 384}};
  for (const auto& [kernel, n] : floats)
    for (const int64_t less : {0, 1}) {
      setenv("TANDEM_GPU_MEMORY", std::to_string(2 * 4 * (n - less)).c_str(), 1);
      const SmallKernelTimer timer = small_kernel_timer(config, kTokens, 1 << 20);
      const std::optional<double> seconds = timer(kernel, kTokens, kRunSeconds);
      EXPECT_EQ(seconds.has_value(), less == 0) << name_of(kernel);
      EXPECT_GE(seconds.value_or(1), 0);
    }
  unsetenv("TANDEM_GPU_MEMORY");
}

// There is memory for one launch of the largest kernel, even if nothing else is asked for. Matrices
// of more than 2^32 numbers do not fit.
TEST_F(GpuKernelBench, SmallKernelsThatFitAndThatDoNot) {
  if (!gpu::open_gpu().emulated) GTEST_SKIP() << "the memory of a GPU is what it is";
  constexpr int kTokens = 40;
  EXPECT_TRUE(small_kernel_timer(config_, kTokens, 0)(SmallKernel::kCombine, kTokens, kRunSeconds));
  const SmallKernelTimer timer = small_kernel_timer(config_, 1, 1 << 16);
  for (int k = 0; k < static_cast<int>(SmallKernel::kKernels); ++k)
    for (const int n : {1 << 23, 1 << 25, 1 << 26, 22'369'622})  // the last: 2^32 / 192
      EXPECT_FALSE(timer(static_cast<SmallKernel>(k), n, kRunSeconds))
          << name_of(static_cast<SmallKernel>(k)) << " " << n;
}

TEST_F(GpuKernelBench, SmallKernelsWithoutAGpu) {
  bench_kernels(input({4}), {}, collect());
  for (const Json& row : rows_) {
    EXPECT_TRUE(row["gpu_seconds"].is_null());
    EXPECT_FALSE(row.contains("ratio"));
  }
  EXPECT_NE(kernels_benchmark().header(rows_.at(0)).find("no GPU"), std::string::npos);
}

// Bytes for 512 tokens of R1 in MB, as in docs/measurements/gpu_kernels.md.
TEST(SmallKernelBytes, OfR1) {
  const ModelConfig r1;
  const std::pair<SmallKernel, double> kWanted[] = {
      {SmallKernel::kEmbed, 22.0},    {SmallKernel::kNorm, 58.7},
      {SmallKernel::kAppend, 35.3},   {SmallKernel::kAppendFp8, 35.1},
      {SmallKernel::kRoute, 22.1},    {SmallKernel::kSortPairs, 0.050},
      {SmallKernel::kGather, 29.4},   {SmallKernel::kRound, 22.0},
      {SmallKernel::kCombine, 146.8}, {SmallKernel::kSiluMul, 113.2},
      {SmallKernel::kAdd, 44.0}};
  for (const auto& [kernel, mb] : kWanted)
    EXPECT_NEAR(static_cast<double>(bytes_of(kernel, r1, 512)) * 1e-6, mb, mb * 0.01)
        << name_of(kernel);
}

TEST_F(GpuKernelBench, Products) {
  const Benchmark products = products_benchmark();
  for (const DType type : {DType::kBF16, DType::kF8E4M3}) {
    rows_.clear();
    std::string cublas;
    const ProductTimer timer = product_timer(config_, {type}, cublas);
    bench_products(input({17, 40}, type), timer, cublas, collect());
    expect_times_on_gpu(2 * 5);
    for (const Json& row : rows_) {
      EXPECT_EQ(row["cublas_ratio"].is_number(), row["cublas_seconds"].is_number());
      if (gpu::open_gpu().emulated) {
        EXPECT_EQ(row["cublas"], "not installed");
        EXPECT_TRUE(row["cublas_seconds"].is_null());
      }
      EXPECT_NE((products.header(row) + products.text(row)).find(row["cublas"]), std::string::npos);
    }
    // 40 rows for each of 8 experts of [128, 128], gate and up.
    EXPECT_EQ(rows_.at(7)["ops"], 2 * 40 * 8 * 2 * 128 * 128);
  }
}

// A product is measured if its matrices take at most three quarters of the memory.
TEST_F(GpuKernelBench, ProductsTakeTheMemoryOfTheirMatrices) {
  if (!gpu::open_gpu().emulated) GTEST_SKIP() << "the memory of a GPU is what it is";
  using Kind = ManyRowsProduct::Kind;
  const auto is_measured = [&](const ManyRowsProduct& p, int n, DType type, int64_t memory) {
    setenv("TANDEM_GPU_MEMORY", std::to_string(memory).c_str(), 1);
    std::string cublas;
    const ProductTimes times = product_timer(config_, {type}, cublas)(p, n, kRunSeconds);
    unsetenv("TANDEM_GPU_MEMORY");
    EXPECT_FALSE(times.cublas);
    return times.ours.has_value();
  };
  const auto expect_bytes = [&](const ManyRowsProduct& p, DType type, int64_t bytes) {
    const int64_t memory = (bytes * 4 + 2) / 3;
    EXPECT_TRUE(is_measured(p, 20, type, memory)) << p.what << " " << name_of(type);
    EXPECT_FALSE(is_measured(p, 20, type, memory - 1)) << p.what << " " << name_of(type);
  };
  // Rows of 45 columns take 48. Of x there are 20 rows in BF16, for `down` as many for each of
  // three experts; outputs are floats, and for gate and up there are two.
  const ManyRowsProduct dense = {"dense", Kind::kDense, 32, 45};
  const ManyRowsProduct wide = {"wide", Kind::kDense, 32, 1100};  // its columns are divided
  const ManyRowsProduct gate_up = {"gate_up", Kind::kGateUp, 32, 45, 3};
  const ManyRowsProduct down = {"down", Kind::kDown, 32, 45, 3};
  expect_bytes(dense, DType::kBF16, 32 * 48 * 2 + 20 * 48 * 2 + 20 * 32 * 4);
  expect_bytes(dense, DType::kF8E4M3, 32 * 48 + 20 * 48 * 2 + 20 * 32 * 4);
  expect_bytes(wide, DType::kBF16, 32 * 1104 * 2 + 20 * 1104 * 2 + 20 * 32 * 4);
  expect_bytes(gate_up, DType::kBF16, 3 * 64 * 48 * 2 + 20 * 48 * 2 + 20 * 3 * 64 * 4);
  expect_bytes(gate_up, DType::kF8E4M3, 3 * 64 * 48 + 20 * 48 * 2 + 20 * 3 * 64 * 4);
  expect_bytes(down, DType::kBF16, 3 * 32 * 48 * 2 + 60 * 48 * 2 + 20 * 3 * 32 * 4);
  expect_bytes(down, DType::kF8E4M3, 3 * 32 * 48 + 60 * 48 * 2 + 20 * 3 * 32 * 4);
  // Weights, inputs and outputs of a little more than 2^32 bytes.
  constexpr int64_t kMost = 1 << 30;
  EXPECT_FALSE(is_measured({"weights", Kind::kDense, 65537, 32768}, 1, DType::kBF16, kMost));
  EXPECT_FALSE(is_measured({"inputs", Kind::kDown, 16, 16384, 2048}, 65, DType::kF8E4M3, kMost));
  EXPECT_FALSE(is_measured({"outputs", Kind::kDense, 16385, 16}, 65536, DType::kBF16, kMost));
}

// A GPU that takes 2 ms for what cuBLAS takes 1 ms, and has no room for more than 100 rows.
TEST_F(GpuKernelBench, ProductsBesideCublas) {
  const Benchmark products = products_benchmark();
  const BenchInput bench = input({100, 200});
  const auto timer = [](const ManyRowsProduct& p, int n, double) {
    if (n > 100) return ProductTimes{};
    if (p.kind == ManyRowsProduct::Kind::kDown)
      return ProductTimes{2e-3, 1e-3, {}, "not in 120400"};
    return ProductTimes{2e-3, 1e-3, 0.5e-3};
  };
  bench_products(bench, timer, "130100", collect());
  EXPECT_FALSE(rows_.at(0).contains("datasheet_ratio"));
  EXPECT_EQ(products.header(rows_.at(0)).find("data sheet"), std::string::npos);
  EXPECT_EQ(rows_.at(0)["cublas_ratio"], 0.5);
  EXPECT_DOUBLE_EQ(rows_.at(0)["ops_per_second"], 2. * 100 * 128 * 128 / 2e-3);
  EXPECT_NE(products.text(rows_.at(0)).find("50 %"), std::string::npos);
  EXPECT_TRUE(rows_.at(1)["gpu_seconds"].is_null());
  EXPECT_NE(products.text(rows_.at(1)).find("no room"), std::string::npos);

  EXPECT_FALSE(rows_.at(0).contains("cublas_grouped_seconds")) << "a dense product";
  const Json &gate_up = rows_.at(6), &no_room = rows_.at(7), &down = rows_.at(8);
  EXPECT_EQ(gate_up["cublas_grouped_seconds"], 0.5e-3);
  EXPECT_EQ(gate_up["cublas_grouped_ratio"], 0.25);
  EXPECT_EQ(gate_up["cublas_grouped_why_not"], "");
  EXPECT_NE(products.text(gate_up).find("25 %"), std::string::npos);
  EXPECT_TRUE(no_room["cublas_grouped_seconds"].is_null());
  EXPECT_TRUE(down["cublas_grouped_ratio"].is_null());
  EXPECT_EQ(down["cublas_grouped_why_not"], "not in 120400");
  EXPECT_NE(products.text(down).find("not in 120400"), std::string::npos);
}

// A GPU with a data sheet that promises 10 Top/s; it multiplies 1 Top/s by mma.
TEST_F(GpuKernelBench, ProductsBesideTheDataSheet) {
  const Benchmark products = products_benchmark();
  BenchInput bench = input({100, 200});
  bench.gpu->datasheet_bf16_ops_per_second = 1e13;
  const auto timer = [](const ManyRowsProduct& p, int n, double) {
    return n > 100 ? ProductTimes{} : ProductTimes{2. * n * p.n_weights() / 4e12, {}};
  };
  bench_products(bench, timer, "not installed", collect());
  EXPECT_EQ(rows_.at(0)["peak_ops_per_second"], 1e12);
  EXPECT_EQ(rows_.at(0)["datasheet_bf16_ops_per_second"], 1e13);
  EXPECT_DOUBLE_EQ(rows_.at(0)["datasheet_ratio"].get<double>(), 0.4);
  EXPECT_TRUE(rows_.at(1)["datasheet_ratio"].is_null());
  const std::string header = products.header(rows_.at(0)), line = products.text(rows_.at(0));
  EXPECT_NE(header.find("1 Top/s by mma (data sheet: 10)"), std::string::npos) << header;
  EXPECT_NE(line.find("40 %"), std::string::npos) << line;
  // The columns of every line are those of the header.
  const std::string titles = header.substr(header.find("| product"));
  const auto n_columns = [](const std::string& text) {
    return std::count(text.begin(), text.begin() + static_cast<long>(text.find('\n')), '|');
  };
  for (const Json& row : rows_) EXPECT_EQ(n_columns(products.text(row)), n_columns(titles));
}

// The cost is a difference of times, which can have any value on an emulated GPU.
TEST(HandOffRow, HasBothKinds) {
  HandOffs measured = measured_hand_offs(kRunSeconds);
  EXPECT_TRUE(measured.kernels.recorded && measured.kernels.enqueued);
  EXPECT_EQ(measured.kernels.why_not, "");
  EXPECT_TRUE(measured.memory_operations.enqueued) << measured.memory_operations.why_not;
  measured.memory_operations.recorded = {};
  const Json row = hand_off_row(measured, "made up");
  EXPECT_EQ(row["kernels"]["recorded_seconds"], *measured.kernels.recorded);
  EXPECT_EQ(row["memory_operations"]["enqueued_seconds"], *measured.memory_operations.enqueued);
  EXPECT_TRUE(row["memory_operations"]["recorded_seconds"].is_null());
  EXPECT_NE(hybrid_benchmark().text(row).find("refused"), std::string::npos);
}

TEST(KernelGap, IsTheTimeOfAKernelWithoutCycles) {
  EXPECT_DOUBLE_EQ(gap_between({1000, 1.5e-6}, {5000, 3.5e-6}), 1e-6);  // the clock is 2 GHz
  EXPECT_NEAR(gap_between({1000, 0.5e-6}, {5000, 2.5e-6}), 0, 1e-15);
  const std::optional<double> gap = measured_kernel_gap(kRunSeconds);  // empty on a busy machine
  if (gap) {
    EXPECT_GT(*gap, 0);
    EXPECT_LT(*gap, 0.1);
  }
}

}  // namespace
}  // namespace tandem
