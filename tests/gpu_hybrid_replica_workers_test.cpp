// Replicas of a backbone on the emulated GPUs of ranks, which are threads here. Each has links of
// its own to workers, and experts on its GPU: the CPU's logits and answers, also while workers are
// lost and steps fail.
#include <gtest/gtest.h>

#include <numeric>

#include "ops/cuda_device.h"
#include "tests/expert_moves.h"
#include "tests/golden_file.h"
#include "tests/hybrid_placements.h"
#include "tests/rank_grids.h"
#include "tests/worker_backbones.h"
#include "tests/worker_models.h"

namespace tandem::test {
namespace {

ModelOptions replicas(ModelOptions options) {
  options.n_replicas = 2;
  return options;
}

// Each GPU has the whole backbone, and half of the experts.
int64_t bytes_for(const ModelOptions& options, int64_t step) {
  return bytes_for_experts([&] { return LoadedModel(options).device(); }, 0.5, step);
}

TEST(GpuReplicasWithWorkers, GiveTheCpusLogits) {
  for (const char* family : {"v3_fp8", "v2_lite"}) {
    SCOPED_TRACE(family);
    const std::string directory = kGolden + family;
    ModelOptions options = {.directory = directory,
                            .device = DeviceChoice::kCuda,
                            .isa = cpu::Isa::kReference,
                            .n_threads = 1,
                            .context = kContext,
                            .max_logits = 34};
    const int64_t bytes = bytes_for(options, 1000);
    const int n = ModelConfig::from_directory(directory).router.n_experts;
    const std::vector<int32_t> tokens =
        GoldenFile(directory + "/golden.safetensors").ints("tokens_17");
    ModelOptions on_cpu = options;
    on_cpu.device = DeviceChoice::kCpu;
    LoadedModel cpu(on_cpu);
    const Logits want = logits_at_once(cpu, tokens, 1)[0];
    ASSERT_EQ(want.size(), 16u);
    const std::string first = fmt::format("0-{}", n / 2 - 1),
                      last = fmt::format("{}-{}", n / 2, n - 1);
    // With the last one each replica has the first half itself, on its GPU and its CPU.
    const std::vector<std::vector<std::string>> divisions = {
        {"auto", "auto"}, {first, last}, {last}};
    const LimitedGpuMemory memory(bytes);
    for (size_t i = 0; i < divisions.size(); ++i) {
      SCOPED_TRACE(fmt::format("{}", fmt::join(divisions[i], " | ")));
      LoadedExpertsOptions of_worker = served(directory, "");
      of_worker.isa = options.isa;
      const Workers workers(of_worker, divisions[i]);
      options.workers.addresses = workers.addresses;
      options.micro_batches = static_cast<int>(i + 1);
      std::vector<std::vector<WorkerStatus>> of_rank(2);
      run_local_ranks({2}, [&](Group& group) {
        StepChannel steps(group, [](const GroupError& error) { ADD_FAILURE() << error.what(); });
        LoadedModel loaded(on_rank(replicas(options), group, &steps));
        EXPECT_TRUE(says(loaded.device(), "experts also on workers"));
        if (steps.leads()) {
          for (const Logits& rows : logits_at_once(loaded, tokens, 2))
            expect_close_logits(rows, want, 2e-2);
          steps.end();
        } else {
          steps.follow();
        }
        of_rank[group.rank()] = loaded.model().workers();
      });
      for (int rank = 0; rank < 2; ++rank) {
        ASSERT_EQ(of_rank[rank].size(), divisions[i].size());
        expect_all_used(of_rank[rank]);
        for (const WorkerStatus& worker : of_rank[rank]) EXPECT_EQ(worker.replica, rank);
      }
    }
  }
}

// Recorded decode steps go on while one owner after the other is lost and comes back.
TEST(GpuReplicasWithWorkers, AnswerWhoeverComputes) {
  const std::vector<std::vector<int32_t>> want = answers(tiny_r1(DeviceChoice::kCpu), 4);
  ModelOptions options = tiny_r1(DeviceChoice::kCuda);
  const LimitedGpuMemory memory(bytes_for(options, 20'000));
  Workers workers(served(kTinyR1, ""), {"auto", "auto"});
  options.workers.addresses = workers.addresses;
  while_owners_change(workers, served(kTinyR1, "auto"), [&] {
    for (const int micro_batches : {1, 2}) {
      options.micro_batches = micro_batches;
      on_ranks_of_backbone(2, replicas(options), [&](const ModelOptions& of_rank) {
        EXPECT_EQ(answers(of_rank, 4), want) << micro_batches;
      });
    }
    return 0;
  });
}

// The kernels of a failed step, launched and recorded, have taken and given all their signals, on
// the rank that has failed and on the other one.
TEST(GpuReplicasWithWorkers, AnswerAfterAFailedStep) {
  const std::vector<std::vector<int32_t>> want = answers(tiny_r1(DeviceChoice::kCpu), 2);
  const ModelOptions options = tiny_r1(DeviceChoice::kCuda);
  const LimitedGpuMemory memory(bytes_for(options, 20'000));
  expect_replicas_answer_after_failed_steps(options, "8-15", want);
}

// A decode step is recorded, whatever the other replica computes in it; without tokens nothing is.
TEST(GpuReplicasWithWorkers, RecordTheirOwnSteps) {
  ModelOptions options = tiny_r1(DeviceChoice::kCuda);
  const LimitedGpuMemory memory(bytes_for(options, 20'000));
  const Workers workers(served(kTinyR1, ""), {"auto"});
  options.workers.addresses = workers.addresses;
  options.attention = AttentionForm::kAbsorbed;
  run_local_ranks({2}, [&](Group& group) {
    StepChannel steps(group, [](const GroupError& error) { ADD_FAILURE() << error.what(); });
    LoadedModel loaded(on_rank(replicas(options), group, &steps));
    if (steps.leads()) {
      const std::vector<int32_t> pages = {0, 1, 2};
      const std::vector<int32_t> tokens(40, 5), rows = {0};
      std::vector<int32_t> positions(40);
      std::iota(positions.begin(), positions.end(), 0);
      const auto batch = [&](const std::vector<Sequence>& sequences, int n) {
        return Batch{std::span(tokens).first(n), std::span(positions).first(n), sequences,
                     std::span(rows).first(n > 0 ? 1 : 0)};
      };
      const std::vector<Sequence> one = {{0, 1, 1, pages}};
      for (const int other : {0, 1, 7, 20, 33}) {
        std::vector<Sequence> of_other;
        if (other > 0) of_other.push_back({0, other, other, pages});
        const Batch both[] = {batch(one, 1), batch(of_other, other)};
        loaded.model().forward(both, loaded.cache());
      }
      steps.end();
    } else {
      steps.follow();
    }
    EXPECT_EQ(dynamic_cast<CudaDevice&>(loaded.model().device()).n_recorded(), 1) << group.rank();
  });
}

TEST(GpuReplicasWithWorkers, AreRefused) {
  const WorkerThread worker(served(kTinyR1, "auto"));
  ModelOptions options = replicas(tiny_r1(DeviceChoice::kCuda));
  options.workers.addresses = {worker.address()};
  const LimitedGpuMemory memory(kEnough);
  EXPECT_TRUE(says(refusal_of_ranks(2, [&](int) { return options; }),
                   "--workers: the GPU has room for all experts"));
}

}  // namespace
}  // namespace tandem::test
