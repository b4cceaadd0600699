// Expert workers with a GPU, real or emulated: which of their experts are on it, the bits of their
// sums, and which workers may have the same experts.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <random>

#include "core/memory.h"
#include "gpu_kernels/runtime.h"
#include "loader/served_division.h"
#include "model/checkpoint.h"
#include "offload/gpu/cuda_expert_rows.h"
#include "offload/workers/worker_fit.h"
#include "ops/cuda_weights.h"
#include "tests/error_of.h"
#include "tests/hybrid_placements.h"
#include "tests/served_on_gpu.h"
#include "tests/worker_backbones.h"

namespace tandem::test {
namespace {

std::string names_of(const std::vector<bool>& experts) { return text_of_experts(listed(experts)); }

ServedDivision division_of(const LoadedExpertsOptions& options) {
  ModelConfig config = ModelConfig::from_directory(options.directory);
  if (options.draft == DraftChoice::kMtp) config.n_used_mtp_layers = config.n_mtp_layers;
  const WeightStore store(options.directory);
  ModelWeights stored = stored_weights(store, config);
  const cpu::KernelTable kernels = cpu::kernels_for(default_isa());
  const Topology topology = with_threads(this_topology(), 1);
  const CpuWeights home(kernels, topology);
  return divide_served(options,
                       {config, stored, home,
                        experts_from_text(options.experts, config.router.n_experts, "--experts")});
}

TEST(ServedDivision, FillsTheGpuWithTheSameExpertsOfEveryLayer) {
  if (!gpu::open_gpu().emulated) GTEST_SKIP() << "the memory of a GPU is what it is";
  for (const std::string experts : {"auto", "1,3-6"}) {
    LoadedExpertsOptions options = served_on_gpu(kServedModel, experts);
    const std::vector<bool> all = experts_from_text(experts, 8, "--experts");
    const std::vector<int> names = listed(all);
    for (int n = 1; n <= std::ssize(names); ++n) {
      const int64_t bytes = gpu_bytes_for(options, n);
      // Memory for an expert more in one of two layers is not enough for one in each.
      const int64_t of_expert = n < std::ssize(names) ? gpu_bytes_for(options, n + 1) - bytes : 1;
      for (const int64_t more : {int64_t{0}, of_expert - 1}) {
        const LimitedGpuMemory memory(bytes + more);
        const ServedDivision division = division_of(options);
        EXPECT_EQ(names_of(division.on_gpu), text_of_experts({names.begin(), names.begin() + n}));
        for (int layer = 0; layer < 3; ++layer)
          for (int e = 0; e < 8; ++e) {
            const WeightSpec spec = {"", layer, e, WeightUse::kExpert, 1, 1};
            if (layer == 0) continue;  // it is dense
            EXPECT_EQ(division.gpu.experts[layer][e], division.on_gpu[e]);
            EXPECT_EQ(division.in_memory.keeps(spec), all[e] && !division.on_gpu[e]);
          }
      }
      const LimitedGpuMemory less(bytes - 1);
      if (n > 1) {
        EXPECT_EQ(names_of(division_of(options).on_gpu),
                  text_of_experts({names.begin(), names.begin() + n - 1}));
      } else {
        EXPECT_TRUE(says(error_of([&] { division_of(options); }),
                         "GB free, and one expert of every layer needs"));
      }
    }
  }
}

// Bytes on the GPU, by hand: rows and sums in float, three experts and weights for each row; and
// nothing of a backbone.
TEST(ServedDivision, CountsWhatIsAllocated) {
  const ModelConfig config = ModelConfig::from_directory(kServedModel);
  const WeightStore store(kServedModel);
  ModelWeights stored = stored_weights(store, config);
  const GpuMemory memory = gpu_expert_memory(stored, config, 512);
  EXPECT_FALSE(memory.streams);
  EXPECT_EQ(memory.other_bytes({}, 0, 0), CudaExpertRows::bytes_for(config, 512) +
                                              512 * (2 * 136 * 4 + 2 * 3 * 4) +
                                              (gpu::open_gpu().emulated ? 0 : 100 << 20));
  int64_t bytes = 0;  // of expert 0 of both layers
  for (const int layer : {1, 2}) {
    const FfnWeights& expert = stored.layers[layer].experts[0];
    for (const QuantView& w : {expert.gate, expert.up, expert.down})
      bytes += CudaWeights::bytes_of(w, WeightUse::kExpert);
  }
  EXPECT_EQ(memory.weight_bytes(evenly_on_gpu(config, 2)), bytes);
}

TEST(ServedDivision, SaysWhyTheCpuComputes) {
  if (!gpu::open_gpu().emulated) GTEST_SKIP() << "the memory of a GPU is what it is";
  std::string warned;
  LoadedExpertsOptions options = served_on_gpu(kServedModel, "auto");
  options.warn = [&](const std::string& line) { warned += line + "\n"; };
  const auto expect_refused = [&](const std::string& why) {
    options.device = DeviceChoice::kCuda;
    EXPECT_TRUE(says(error_of([&] { LoadedExperts loaded(options); }), why));
    EXPECT_EQ(warned, "");
    options.device = DeviceChoice::kAuto;
    LoadedExperts loaded(options);
    EXPECT_TRUE(says(warned, "running on the CPU: ")) << why;
    EXPECT_TRUE(says(warned, why));
    EXPECT_TRUE(loaded.served().welcome.on_gpu.empty());
    EXPECT_EQ(loaded.served().welcome.gpu_arithmetic, "");
    warned.clear();
  };
  {
    const LimitedGpuMemory none(0);
    expect_refused("no NVIDIA GPU can be used");
  }
  {
    const LimitedGpuMemory little(5000);
    expect_refused("one expert of every layer needs");
  }
  options.format = weight_format("int8");
  expect_refused("--format int8: a GPU keeps experts as the checkpoint stores them");
  options.format = {};
  options.experts = kStandby;
  expect_refused("--experts standby: a standby loads experts into its memory");
}

// Of MTP layers too, unless fewer of the other layers would then fit.
TEST(ServedDivision, HasExpertsOfDrafts) {
  if (!gpu::open_gpu().emulated) GTEST_SKIP() << "the memory of a GPU is what it is";
  LoadedExpertsOptions options = served_on_gpu(kGolden + "v3_fp8", "auto");
  options.draft = DraftChoice::kMtp;
  const int64_t enough = gpu_bytes_for(options, 5);
  options.draft = DraftChoice::kAuto;
  options.largest_mtp_share = 1;
  std::string warned;
  options.warn = [&](const std::string& line) { warned += line; };
  const int n_layers = ModelConfig::from_directory(options.directory).n_layers;
  {
    const LimitedGpuMemory memory(kEnough);
    EXPECT_GT(LoadedExperts(options).served().welcome.n_layers, n_layers);
  }
  EXPECT_EQ(warned, "");
  const LimitedGpuMemory memory(enough);
  LoadedExperts loaded(options);
  EXPECT_EQ(loaded.served().welcome.n_layers, n_layers);
  EXPECT_TRUE(says(warned, "the GPU has room for fewer experts with them"));
}

// Random rows, not only of numbers that BF16 has.
struct WorkerRows {
  std::vector<float> x, weights;
  std::vector<int32_t> ids;
  int n, dim, n_active;

  WorkerRows(int n_rows, const ModelConfig& c, int seed)
      : n(n_rows), dim(static_cast<int>(c.dim)), n_active(c.router.n_active) {
    std::mt19937 random(seed);
    std::uniform_real_distribution<float> number(-1, 1);
    for (int i = 0; i < n * dim; ++i) x.push_back(number(random));
    for (int t = 0; t < n; ++t) {
      std::vector<int32_t> all(c.router.n_experts);
      std::iota(all.begin(), all.end(), 0);
      std::shuffle(all.begin(), all.end(), random);
      for (int k = 0; k < n_active; ++k) {
        ids.push_back(random() % 10 == 0 ? -1 : all[k]);
        weights.push_back(0.1f + 0.9f * std::abs(number(random)));
      }
    }
  }
  // The sums of rows [first, first + count) as one batch.
  std::vector<float> sums(ExpertPool& pool, int layer, int first, int count) {
    const auto view = [&](auto& data, int64_t cols, DType dtype) {
      return TensorView{data.data() + first * cols, count, cols, cols, dtype};
    };
    std::vector<float> y(static_cast<size_t>(count) * dim);
    const Ticket ticket = pool.submit(
        {.layer = layer,
         .x = view(x, dim, DType::kF32),
         .routing = {view(ids, n_active, DType::kI32), view(weights, n_active, DType::kF32)}});
    pool.add_to(ticket, {y.data(), count, dim, dim, DType::kF32});
    return y;
  }
};

class GpuWorkerRows : public testing::TestWithParam<std::string> {};

// Requests of several backbones are computed together. Rows are in tiles of 32, 64 and 128, some of
// which end within an expert's rows.
TEST_P(GpuWorkerRows, DoNotDependOnThoseBeside) {
  const std::string directory = kGolden + GetParam();
  constexpr int kRows = 300;
  LoadedExpertsOptions options = served_on_gpu(directory, "auto");
  const bool emulated = gpu::open_gpu().emulated;
  for (const bool is_mixed : {false, true}) {
    if (is_mixed && !emulated) continue;  // the memory of a GPU is what it is
    const LimitedGpuMemory memory(is_mixed ? gpu_bytes_for(options, 4) : kEnough);
    LoadedExperts loaded(options);
    const ServedExperts of = loaded.served();
    EXPECT_EQ(std::ssize(listed(of.welcome.on_gpu)), is_mixed ? 4 : of.config.router.n_experts);
    WorkerRows rows(kRows, of.config, 7);
    for (const int layer : {1, 2}) {
      const std::vector<float> want = rows.sums(of.experts, layer, 0, kRows);
      for (const auto& [first, n] :
           {std::pair(0, 1), {3, 1}, {299, 1}, {10, 33}, {44, 90}, {100, 200}})
        EXPECT_EQ(rows.sums(of.experts, layer, first, n),
                  std::vector<float>(want.begin() + first * rows.dim,
                                     want.begin() + (first + n) * rows.dim))
            << "rows " << first << " to " << first + n;
    }
  }
}

// Experts are added in ascending order, however the row names them.
TEST_P(GpuWorkerRows, DoNotDependOnTheOrderOfTheirExperts) {
  LoadedExperts loaded(served_on_gpu(kGolden + GetParam(), "auto"));
  const ServedExperts of = loaded.served();
  WorkerRows rows(20, of.config, 3);
  const std::vector<float> want = rows.sums(of.experts, 1, 0, rows.n);
  for (int t = 0; t < rows.n; ++t) {
    std::reverse(rows.ids.begin() + t * rows.n_active, rows.ids.begin() + (t + 1) * rows.n_active);
    std::reverse(rows.weights.begin() + t * rows.n_active,
                 rows.weights.begin() + (t + 1) * rows.n_active);
  }
  EXPECT_EQ(rows.sums(of.experts, 1, 0, rows.n), want);
}

// The backbone sends BF16 where workers say that they round to that anyway.
TEST_P(GpuWorkerRows, AreOfBf16WhereTheWorkerSaysSo) {
  LoadedExperts loaded(served_on_gpu(kGolden + GetParam(), "auto"));
  const ServedExperts of = loaded.served();
  EXPECT_EQ(of.welcome.takes_bf16, GetParam() != "t1") << "float experts";
  if (!of.welcome.takes_bf16) return;
  WorkerRows rows(20, of.config, 5), rounded = rows;
  for (float& x : rounded.x) {
    uint32_t bits = std::bit_cast<uint32_t>(x);
    bits += 0x7fff + (bits >> 16 & 1);
    x = std::bit_cast<float>(bits & 0xffff0000);
  }
  EXPECT_NE(rounded.x, rows.x);
  EXPECT_EQ(rounded.sums(of.experts, 2, 0, rows.n), rows.sums(of.experts, 2, 0, rows.n));
}

// The CPU's sums within the rounding of the GPU, whichever experts are there.
TEST_P(GpuWorkerRows, HaveTheSumsOfTheCpu) {
  if (!gpu::open_gpu().emulated) GTEST_SKIP() << "the memory of a GPU is what it is";
  LoadedExpertsOptions options = served_on_gpu(kGolden + GetParam(), "auto");
  options.device = DeviceChoice::kCpu;
  options.isa = cpu::Isa::kReference;
  LoadedExperts cpu(options);
  WorkerRows rows(20, cpu.served().config, 11);
  options.device = DeviceChoice::kCuda;
  for (const int n : {1, 5, 8}) {
    const LimitedGpuMemory memory(gpu_bytes_for(options, n));
    LoadedExperts loaded(options);
    for (const int layer : {1, 2}) {
      const std::vector<float> want = rows.sums(cpu.served().experts, layer, 0, rows.n),
                               got = rows.sums(loaded.served().experts, layer, 0, rows.n);
      float largest = 0, error = 0;
      for (size_t i = 0; i < want.size(); ++i) {
        largest = std::max(largest, std::abs(want[i]));
        error = std::max(error, std::abs(want[i] - got[i]));
      }
      EXPECT_GT(largest, 0);
      EXPECT_LE(error, 2e-2f * largest) << n << " on the GPU, layer " << layer;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Families, GpuWorkerRows,
                         testing::Values("v3_fp8", "v2_lite", "kimi_k2_thinking", "t1"),
                         [](const auto& info_of) { return info_of.param; });

// The bits of a sum depend on the places of the experts that it has, and on nothing else of the
// worker.
TEST(GpuWorkerArithmetic, IsThatOfTheExpertsAsked) {
  const WorkerWelcome cpu = {
      .n_layers = 1, .experts = {{true, true, true, true}}, .arithmetic = "kernels avx2"};
  WorkerWelcome mixed = cpu;
  mixed.on_gpu = {true, true, false, false};
  mixed.gpu_arithmetic = "GPU";
  WorkerWelcome other = mixed;
  other.on_gpu = {true, false, false, false};
  EXPECT_EQ(arithmetic_of(mixed, {2, 3}), arithmetic_of(cpu, {2, 3}));
  EXPECT_NE(arithmetic_of(mixed, {0, 1}), arithmetic_of(cpu, {0, 1}));
  EXPECT_NE(arithmetic_of(mixed, {1, 2}), arithmetic_of(cpu, {1, 2}));
  EXPECT_NE(arithmetic_of(mixed, {1, 2}), arithmetic_of(mixed, {0, 1}));
  EXPECT_EQ(arithmetic_of(mixed, {0}), arithmetic_of(other, {0}));
  EXPECT_EQ(arithmetic_of(mixed, {0, 2, 3}), arithmetic_of(other, {0, 2, 3}));
  EXPECT_NE(arithmetic_of(mixed, {0, 1, 2}), arithmetic_of(other, {0, 1, 2}));
}

}  // namespace
}  // namespace tandem::test
