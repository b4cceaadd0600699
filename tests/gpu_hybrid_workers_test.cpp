// A backbone on the GPU, real or emulated, with some experts there and the others on workers: the
// CPU's logits and answers, also while workers are lost and steps fail.
#include <gtest/gtest.h>

#include <algorithm>

#include "gpu_kernels/runtime.h"
#include "tests/golden_file.h"
#include "tests/hybrid_placements.h"
#include "tests/worker_models.h"

namespace tandem::test {
namespace {

int64_t bytes_for_half_of_the_experts(const ModelOptions& options, int64_t step) {
  return bytes_for_experts([&] { return LoadedModel(options).device(); }, 0.5, step);
}

class HybridWorkers : public testing::TestWithParam<std::string> {};

TEST_P(HybridWorkers, GiveTheCpusLogits) {
  if (!gpu::open_gpu().emulated) GTEST_SKIP() << "the memory of a GPU is what it is";
  const std::string directory = kGolden + GetParam();
  const int n = ModelConfig::from_directory(directory).router.n_experts;
  const std::vector<int32_t> tokens =
      GoldenFile(directory + "/golden.safetensors").ints("tokens_17");
  ModelOptions options = {.directory = directory,
                          .isa = cpu::Isa::kReference,
                          .n_threads = 1,
                          .context = kContext,
                          .max_logits = 17};
  LoadedModel cpu(options);
  const Logits want = logits_after(cpu, tokens);
  options.device = DeviceChoice::kCuda;
  const int64_t bytes = bytes_for_half_of_the_experts(options, 1000);
  const std::string first = fmt::format("0-{}", n / 2 - 1),
                    last = fmt::format("{}-{}", n / 2, n - 1);
  int64_t bytes_alone = 0;
  {
    const LimitedGpuMemory memory(bytes);
    bytes_alone = LoadedModel(options).load_report().bytes;
  }
  // With the last one this process has the first half, as far as the GPU has not.
  const std::vector<std::vector<std::string>> divisions = {{"auto", "auto"}, {first, last}, {last}};
  for (size_t i = 0; i < divisions.size(); ++i) {
    const std::vector<std::string>& division = divisions[i];
    options.micro_batches = static_cast<int>(i + 1);
    SCOPED_TRACE(fmt::format("{}", fmt::join(division, " | ")));
    LoadedExpertsOptions of_worker = served(directory, "");
    of_worker.isa = options.isa;
    const Workers workers(of_worker, division);
    options.workers.addresses = workers.addresses;
    const LimitedGpuMemory memory(bytes);
    LoadedModel loaded(options);
    EXPECT_TRUE(says(loaded.device(), "experts also on workers"));
    EXPECT_LT(loaded.load_report().bytes, bytes_alone);
    expect_close_logits(logits_after(loaded, tokens), want, 2e-2);
    expect_all_used(loaded.model().workers());
  }
}

INSTANTIATE_TEST_SUITE_P(Families, HybridWorkers,
                         testing::Values("v3_fp8", "v2_lite", "kimi_k2_thinking"),
                         [](const auto& info_of) { return info_of.param; });

// Recorded decode steps go on while one owner after the other is lost and comes back.
TEST(HybridWorkersOfTinyR1, AnswerWhoeverComputes) {
  if (!gpu::open_gpu().emulated) GTEST_SKIP() << "the memory of a GPU is what it is";
  const std::vector<std::vector<int32_t>> want = answers(tiny_r1(DeviceChoice::kCpu), 4);
  ModelOptions options = tiny_r1(DeviceChoice::kCuda);
  const LimitedGpuMemory memory(bytes_for_half_of_the_experts(options, 20'000));
  Workers workers(served(kTinyR1, ""), {"auto", "auto"});
  options.workers.addresses = workers.addresses;
  EXPECT_EQ(answers(options, 4), want);
  options.micro_batches = 2;
  EXPECT_EQ(
      while_owners_change(workers, served(kTinyR1, "auto"), [&] { return answers(options, 4); }),
      want);
}

// The kernels of a failed step, launched and recorded, have taken and given all their signals.
TEST(HybridWorkersOfTinyR1, AnswerAfterAFailedStep) {
  if (!gpu::open_gpu().emulated) GTEST_SKIP() << "the memory of a GPU is what it is";
  const std::vector<std::vector<int32_t>> want = answers(tiny_r1(DeviceChoice::kCpu), 2);
  ModelOptions options = tiny_r1(DeviceChoice::kCuda);
  const LimitedGpuMemory memory(bytes_for_half_of_the_experts(options, 20'000));
  options.micro_batches = 2;
  expect_answers_after_failed_steps(options, want);
}

TEST(HybridWorkersOfTinyR1, AreRefused) {
  const WorkerThread worker(served(kTinyR1, "auto"));
  ModelOptions options = tiny_r1(DeviceChoice::kCuda);
  options.workers.addresses = {worker.address()};
  const auto refusal = [](const ModelOptions& of) {
    return error_of([&] { LoadedModel loaded(of); });
  };
  const LimitedGpuMemory memory(kEnough);
  for (const bool moves : {false, true}) {
    options.moves_experts = moves;
    EXPECT_TRUE(says(refusal(options), "--workers: the GPU has room for all experts"));
  }
}

}  // namespace
}  // namespace tandem::test
