// A backbone divided among the emulated GPUs of ranks, which are threads here. The first one has
// workers: the CPU's logits and answers, also while workers are lost and steps fail.
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/expert_moves.h"
#include "tests/golden_file.h"
#include "tests/hybrid_placements.h"
#include "tests/rank_grids.h"
#include "tests/worker_backbones.h"
#include "tests/worker_models.h"

namespace tandem::test {
namespace {

// With it both of two ranks have their part of the backbone, and the first one not all experts that
// it would have.
int64_t bytes_for_two_ranks(const ModelOptions& options, int64_t step, double share = 0.25) {
  const auto device_of_first = [&] {
    std::string device;
    run_local_ranks({2}, [&](Group& group) {
      error_of([&] {
        const LoadedModel loaded(on_rank(options, group));
        if (group.rank() == 0) device = loaded.device();
      });
    });
    return device;
  };
  return bytes_for_experts(device_of_first, share, step);
}

ModelOptions small_on_gpus(const std::string& directory) {
  return {.directory = directory,
          .device = DeviceChoice::kCuda,
          .isa = cpu::Isa::kReference,
          .n_threads = 1,
          .context = kContext,
          .max_logits = 17};
}

TEST(GpuRanksWithWorkers, GiveTheCpusLogits) {
  for (const char* family : {"v3_fp8", "v2_lite"}) {
    SCOPED_TRACE(family);
    const std::string directory = kGolden + family;
    ModelOptions options = small_on_gpus(directory);
    const LimitedGpuMemory memory(bytes_for_two_ranks(options, 1000));
    const int n = ModelConfig::from_directory(directory).router.n_experts;
    const std::vector<int32_t> tokens =
        GoldenFile(directory + "/golden.safetensors").ints("tokens_17");
    ModelOptions on_cpu = options;
    on_cpu.device = DeviceChoice::kCpu;
    LoadedModel cpu(on_cpu);
    const Logits want = logits_after(cpu, tokens);
    const std::string first = fmt::format("0-{}", n / 2 - 1),
                      last = fmt::format("{}-{}", n / 2, n - 1);
    for (const auto& division :
         std::vector<std::vector<std::string>>{{"auto", "auto"}, {first, last}, {last}}) {
      SCOPED_TRACE(fmt::format("{}", fmt::join(division, " | ")));
      LoadedExpertsOptions of_worker = served(directory, "");
      of_worker.isa = options.isa;
      const Workers workers(of_worker, division);
      options.workers.addresses = workers.addresses;
      run_local_ranks({2}, [&](Group& group) {
        LoadedModel loaded(on_rank(options, group));
        expect_close_logits(logits_after(loaded, tokens), want, 2e-2);
        EXPECT_EQ(loaded.model().workers().size(), group.rank() == 0 ? division.size() : 0);
        if (group.rank() == 0) {
          EXPECT_TRUE(says(loaded.device(), "experts also on workers"));
        }
        expect_all_used(loaded.model().workers());
      });
    }
  }
}

// Recorded decode steps go on while one owner after the other is lost and comes back.
TEST(GpuRanksWithWorkers, AnswerWhoeverComputes) {
  const std::vector<std::vector<int32_t>> want = answers(tiny_r1(DeviceChoice::kCpu), 4);
  ModelOptions options = tiny_r1(DeviceChoice::kCuda);
  const LimitedGpuMemory memory(bytes_for_two_ranks(options, 20'000));
  Workers workers(served(kTinyR1, ""), {"auto", "auto"});
  options.workers.addresses = workers.addresses;
  while_owners_change(workers, served(kTinyR1, "auto"), [&] {
    for (int i = 0; i < 3; ++i)
      on_ranks_of_backbone(
          2, options, [&](const ModelOptions& of_rank) { EXPECT_EQ(answers(of_rank, 4), want); });
    return 0;
  });
}

// Recorded decode steps go on while experts of the workers move. Those of the GPUs stay.
TEST(GpuRanksWithWorkers, AnswersStayWhileExpertsMove) {
  constexpr int kAnswers = 3;
  const std::vector<std::vector<int32_t>> want = answers(tiny_r1(DeviceChoice::kCpu), kAnswers);
  ModelOptions options = tiny_r1(DeviceChoice::kCuda);
  options.max_logits = 8;
  const LimitedGpuMemory memory(bytes_for_two_ranks(options, 20'000, 0.95));
  LoadedExpertsOptions of_worker = served(kTinyR1, "");
  of_worker.moves_experts = true;
  const Workers workers(of_worker, {"0,2,4,6,8,10", "1,3,5,7,9,11"});
  options = that_moves(options);
  options.workers.addresses = workers.addresses;
  options.workers.deadline = std::chrono::milliseconds(1500);
  const Tokenizer tokenizer = Tokenizer::from_directory(kTinyR1);
  const std::vector<Request> asked = questions(kTinyR1, tokenizer, kAnswers);
  on_ranks_of_backbone(2, options, [&](const ModelOptions& of_rank) {
    LoadedModel loaded(of_rank);
    const ExpertHomes& homes = loaded.expert_homes();
    EXPECT_EQ(homes.n_ranks, 3);
    EXPECT_TRUE(homes.on_gpu.empty()) << "of the first rank alone";
    const std::vector<std::vector<int>>& owners = homes.ranks[1];
    const auto n_on_gpu = std::count(owners.begin(), owners.begin() + 12, std::vector{0});
    EXPECT_TRUE(n_on_gpu > 0 && n_on_gpu < 10) << n_on_gpu << " of the workers' experts";
    Engine engine = moving_engine(loaded, {.plan = random_plan(5)});
    int64_t n_moved = 0;
    for (int round = 0; round < 3; ++round) {
      std::vector<std::vector<int32_t>> got;
      submit_all(engine, asked, got);
      for (int i = 0; i < 5; ++i) step_or_wait(engine);
      n_moved += move_now(engine);
      EXPECT_EQ(got, want);
    }
    EXPECT_GT(n_moved, 0);
    for (int e = 0; e < 16; ++e)
      EXPECT_EQ(engine.expert_homes()->ranks[1][e] == std::vector{0}, owners[e] == std::vector{0});
  });
}

// Only the first of two GPUs waits for workers, so micro-batches would not take turns alike.
TEST(GpuRanksWithWorkers, HaveWholeSteps) {
  constexpr int kSteps = 20;
  ModelOptions options = small_on_gpus(kServedModel);
  const LimitedGpuMemory memory(bytes_for_two_ranks(options, 1000));
  SlowWorker worker(std::chrono::milliseconds(5));
  options.workers.addresses = {worker.address()};
  const std::vector<int32_t> tokens(17, 5);
  on_ranks_of_backbone(2, options, [&](const ModelOptions& of_rank) {
    LoadedModel loaded(of_rank);
    for (int i = 0; i < kSteps; ++i)
      score(loaded.model(), loaded.cache(), tokens, 16, [](int64_t, std::span<const float>) {});
    EXPECT_LE(loaded.model().workers()[0].n_requests, 2 * kSteps) << "of two layers";
  });
}

// The GPUs have added up in every layer of a failed step, launched or recorded.
TEST(GpuRanksWithWorkers, AnswerAfterAFailedStep) {
  const std::vector<std::vector<int32_t>> want = answers(tiny_r1(DeviceChoice::kCpu), 2);
  const ModelOptions options = tiny_r1(DeviceChoice::kCuda);
  const LimitedGpuMemory memory(bytes_for_two_ranks(options, 20'000));
  on_ranks_of_backbone(2, options, [&](const ModelOptions& of_rank) {
    expect_answers_after_failed_steps(of_rank, want);
  });
}

TEST(GpuRanksWithWorkers, AreRefused) {
  const WorkerThread worker(served(kTinyR1, "auto"));
  ModelOptions options = tiny_r1(DeviceChoice::kCuda);
  options.workers.addresses = {worker.address()};
  {
    const LimitedGpuMemory memory(kEnough);
    EXPECT_TRUE(says(refusal_of_ranks(2, [&](int) { return options; }),
                     "--workers: the GPU has room for all experts"));
  }
  const LimitedGpuMemory memory(bytes_for_two_ranks(tiny_r1(DeviceChoice::kCuda), 20'000));
  options.micro_batches = 2;
  EXPECT_TRUE(says(
      refusal_of_ranks(2, [&](int) { return options; }),
      "--micro-batches 2: rows travel only to workers (--workers, on GPUs with a whole backbone)"));
}

}  // namespace
}  // namespace tandem::test
