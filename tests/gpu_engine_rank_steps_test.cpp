// tiny-r1 on the GPUs of several ranks, which are threads here, with emulated GPUs: answers, what
// is recorded, what each rank reads, and refusals.
#include <gtest/gtest.h>

#include <array>
#include <random>

#include "comm/agreement.h"
#include "comm/local_ranks.h"
#include "engine/engine.h"
#include "loader/decision.h"
#include "model/checkpoint.h"
#include "model/cost.h"
#include "scheduling/scheduler.h"
#include "tests/check_close.h"
#include "tests/error_of.h"
#include "tests/expert_moves.h"
#include "tests/gpu_memory.h"
#include "tests/gpu_ranks.h"
#include "tests/hybrid_placements.h"
#include "tests/planner_cases.h"
#include "tests/whole_models.h"

namespace tandem::test {
namespace {

// Answers of rank 0's engine, whose steps the others repeat.
std::vector<std::vector<int32_t>> answers_on_ranks(int n_ranks, const ModelOptions& options,
                                                   int n_questions) {
  std::vector<std::vector<int32_t>> all;
  on_ranks(n_ranks, [&](Group& group) {
    StepChannel steps(group, [](const GroupError& error) { ADD_FAILURE() << error.what(); });
    const ModelOptions mine = on_rank(options, group, &steps);
    if (mine.ranks.follow()) {
      LoadedModel loaded(mine);
      return steps.follow();
    }
    all = answers(mine, n_questions);
    steps.end();
  });
  return all;
}

// Several sequences in chunked prompts and recorded steps, with drafts, streamed experts and a
// cache of either type.
TEST(GpuRanksOfTinyR1, AnswerAsTheCpu) {
  const LimitedGpuMemory memory(kEnough);
  const auto want = answers(tiny_r1(DeviceChoice::kCpu), 3);
  ModelOptions options = tiny_r1(DeviceChoice::kCuda);
  EXPECT_EQ(answers_on_ranks(2, options, 3), want) << "without a placement";
  ModelOptions replicas = options;
  replicas.n_replicas = 2;
  for (const int n : {0, 2}) {
    replicas.micro_batches = n;
    EXPECT_EQ(answers_on_ranks(2, replicas, 3), want) << "replicas, micro-batches " << n;
  }
  ModelOptions stages = options;
  stages.n_stages = 2;
  stages.draft = DraftChoice::kLookup;
  stages.max_logits = 8;
  EXPECT_EQ(answers_on_ranks(2, stages, 3), want) << "a pipeline without a placement";
  std::mt19937 rng(5);
  const ModelConfig config = ModelConfig::from_directory(options.directory);
  struct Case {
    DraftChoice draft;
    int tp;
  };
  for (const auto& [draft, tp] : {Case{DraftChoice::kOff, 2}, Case{DraftChoice::kMtp, 2},
                                  Case{DraftChoice::kOff, 1}, Case{DraftChoice::kMtp, 1}}) {
    Placement placement = random_placement_of_ranks(config, 2, rng, true, tp);
    placement.kv_tokens = options.context;
    placement.prefill_chunk_tokens = 17;
    placement.stream_from_tokens = draft == DraftChoice::kOff ? 9 : 0;
    const PlacementFile file(placement);
    options.placement = file.path();
    options.draft = draft;
    options.max_logits = 8;
    EXPECT_EQ(answers_on_ranks(2, options, 3), want) << name_of(draft) << ", tp " << tp;
  }
}

struct Swapped {
  std::vector<std::vector<int32_t>> answers;
  Scheduler::Counts counts;
};

// Two sequences for each replica, whose answers begin another page than the prompts: at different
// steps, those of the second replica before those of the first.
Swapped answers_of_two(int n_ranks, const ModelOptions& options) {
  Swapped swapped;
  on_ranks(n_ranks, [&](Group& group) {
    StepChannel steps(group, [](const GroupError& error) { ADD_FAILURE() << error.what(); });
    LoadedModel loaded(on_rank(options, group, &steps));
    if (!steps.leads()) return steps.follow();
    Engine engine(loaded.model(), loaded.cache(), {.size = loaded.config().vocab}, loaded.context(),
                  {.keeps_pages = false, .drafting = loaded.drafting()});
    const int n = 2 * engine.grid().n_replicas;
    swapped.answers.resize(n);
    for (int i = 0; i < n; ++i) {
      EngineRequest r;
      const int n_prompt = kPageSize - (i % 2 == 0 ? 7 : 1) - i % 3;
      for (int t = 0; t < n_prompt; ++t)
        r.request.prompt.push_back((t * t + 7 * i) % loaded.config().vocab);
      r.request.max_new_tokens = 12;
      r.on_event = [&swapped, i](const TokenEvent& event) {
        if (event.token) swapped.answers[i].push_back(*event.token);
        return true;
      };
      engine.submit(std::move(r));
    }
    while (engine.step()) {
    }
    swapped.counts = engine.counts().scheduler;
    steps.end();
  });
  return swapped;
}

// Each replica has pages in the host memory of its ranks, which hold the same sequences. With few
// pages sequences are swapped, and answers are those with many.
void expect_swapped_answers(int dp, int tp, int pp, DraftChoice draft) {
  SCOPED_TRACE(fmt::format("dp {}, tp {}, pp {}", dp, tp, pp));
  const LimitedGpuMemory memory(kEnough);
  ModelOptions options = tiny_r1(DeviceChoice::kCuda);
  options.step_tokens = 256;
  options.max_logits = 16;
  options.draft_tokens = 2;
  options.n_replicas = dp;
  options.tp = tp;
  options.n_stages = pp;
  options.draft = draft;
  const int n_ranks = dp * tp * pp;
  options.context = int64_t{30} * kPageSize;
  options.max_kv_tokens = 0;
  const Swapped roomy = answers_of_two(n_ranks, options);
  options.context = int64_t{3} * kPageSize;
  options.max_kv_tokens = int64_t{30} * kPageSize;
  const Swapped tight = answers_of_two(n_ranks, options);
  EXPECT_EQ(roomy.counts.n_preemptions, 0);
  EXPECT_EQ(tight.answers, roomy.answers);
  EXPECT_EQ(tight.counts.n_pages, 3 * dp);
  EXPECT_GE(tight.counts.n_swaps_out, dp);
  EXPECT_EQ(tight.counts.n_swaps_in, tight.counts.n_swaps_out);
  EXPECT_EQ(tight.counts.n_free_host_pages, tight.counts.n_host_pages);
}

TEST(GpuRanksOfTinyR1, SwapSequencesToHostMemory) {
  expect_swapped_answers(2, 1, 1, DraftChoice::kMtp);
}

TEST(GpuRanksOfTinyR1, SwapSequencesOfDividedBackbones) {
  expect_swapped_answers(1, 2, 1, DraftChoice::kOff);
  expect_swapped_answers(1, 1, 2, DraftChoice::kOff);
}

// A replica without tokens takes part in each micro-batch of the other's recorded steps.
TEST(GpuRanksOfTinyR1, RecordHowStepsAreDivided) {
  const LimitedGpuMemory memory(kEnough);
  ModelOptions options = tiny_r1(DeviceChoice::kCuda);
  options.n_replicas = 2;
  options.max_logits = 4;
  options.attention = AttentionForm::kAbsorbed;  // of steps that are recorded
  const std::vector<int32_t> tokens = {5, 80, 300, 41}, rows = {0, 1, 2, 3}, pages = rows;
  struct Step {
    std::vector<int32_t> positions;
    std::vector<Sequence> sequences;
    std::vector<float> logits;  // as a whole step
  };
  std::vector<Step> steps_of;
  for (const std::vector<int>& sizes : {std::vector{1, 1, 1, 1}, {1, 3}, {3, 1}}) {
    Step& step = steps_of.emplace_back();
    for (const int n : sizes) {
      const auto first = static_cast<int32_t>(step.positions.size());
      step.sequences.push_back({first, n, n, std::span(pages).subspan(first, 1)});
      for (int i = 0; i < n; ++i) step.positions.push_back(i);
    }
  }
  on_ranks(2, [&](Group& group) {
    StepChannel steps(group, [](const GroupError& error) { ADD_FAILURE() << error.what(); });
    LoadedModel loaded(on_rank(options, group, &steps));
    StepRunner& model = loaded.model();
    const TensorView logits = model.logits().rows_from(0, 4);
    std::vector<float> got(logits.rows * logits.cols);
    for (const int n : {1, 2, 4, 1, 2, 4, 3})
      for (Step& step : steps_of) {
        const std::array<Batch, 2> batches = {Batch{tokens, step.positions, step.sequences, rows},
                                              Batch{}};
        model.obey_forward(batches, loaded.cache(), n);
        model.device().to_host(logits, {got.data(), logits.rows, logits.cols, logits.cols});
        if (group.rank() > 0) continue;  // it has no tokens
        if (step.logits.empty()) step.logits = got;
        expect_close(got, step.logits, 1e-2 * largest(step.logits));
      }
    group.barrier();
  });
}

// Counted are the router's choices, also of experts whose replica on another rank computes them.
TEST(GpuRanksOfTinyR1, RecordTheRoutingOfOneProcess) {
  const LimitedGpuMemory memory(kEnough);
  ModelOptions options = tiny_r1(DeviceChoice::kCpu);
  options.record_routing = true;
  const std::vector<int32_t> tokens = {5, 80, 300, 41, 7, 99, 150, 23};
  LoadedModel cpu(options);
  logits_after(cpu, tokens);
  const auto want = cpu.routing()->of_layer;
  Placement placement = backbone_on_gpus(cpu.config(), 2);
  placement.kv_tokens = options.context;
  for (int l = 1; l < cpu.config().n_layers; ++l) {
    LayerExperts layer = {l, l, {}};
    for (int e = 0; e < cpu.config().router.n_experts; ++e) {
      std::vector<DeviceId> owners = {{0, e % 2}};
      if (e % 3 == 0) owners.push_back({0, 1 - e % 2});
      layer.groups.push_back({{e}, stored_expert_format(cpu.config()), owners});
    }
    placement.layers.push_back(layer);
  }
  const PlacementFile file(placement);
  options.device = DeviceChoice::kCuda;
  options.placement = file.path();
  on_ranks(2, [&](Group& group) {
    LoadedModel loaded(on_rank(options, group));
    logits_after(loaded, tokens);
    EXPECT_EQ(loaded.routing()->of_layer, want);
    group.barrier();
  });
}

// What a GPU does not hold of a rank's experts is on the CPU, and every expert is read once.
TEST(GpuRanksOfTinyR1, TakeWhatFits) {
  ModelOptions options = tiny_r1(DeviceChoice::kCuda);
  options.context = 64;
  int64_t alone = 0, whole = 0;
  {
    const LimitedGpuMemory memory(kEnough);
    options.device = DeviceChoice::kCpu;
    alone = LoadedModel(options).load_report().bytes;
    options.device = DeviceChoice::kCuda;
  }
  for (const int64_t bytes : {kEnough, int64_t{2'200'000}}) {
    const LimitedGpuMemory memory(bytes);
    std::vector<int64_t> read(2);
    std::vector<std::string> devices(2);
    on_ranks(2, [&](Group& group) {
      LoadedModel loaded(on_rank(options, group));
      read[group.rank()] = loaded.load_report().bytes;
      devices[group.rank()] = loaded.device();
      group.barrier();
    });
    for (const std::string& device : devices)
      EXPECT_EQ(says(device, "experts also on the cpu"), bytes < kEnough) << device;
    const int64_t sum = read[0] + read[1];
    if (whole == 0) whole = sum;
    EXPECT_EQ(sum, whole) << "wherever experts are";
    EXPECT_LT(read[0], alone);
    EXPECT_GT(sum, alone) << "each rank has embedding, norms and latents";
  }
}

TEST(GpuRanksOfTinyR1, RefuseWaysThatRowsCannotGo) {
  const auto refused = [](int n_replicas, ExpertDispatch dispatch, int64_t memory = kEnough,
                          std::optional<ExpertRows> rows = {}) {
    const LimitedGpuMemory limited(memory);
    ModelOptions options = tiny_r1(DeviceChoice::kCuda);
    options.context = 64;
    options.n_replicas = n_replicas;
    options.dispatch = dispatch;
    options.rows = rows;
    return refusal_of_two(options);
  };
  EXPECT_TRUE(says(refused(1, ExpertDispatch::kLowLatency),
                   "--ep-dispatch low-latency: the GPUs of one replica add up their sums by "
                   "all-reduce: leave it out, or use --device cpu"));
  EXPECT_TRUE(says(refused(2, ExpertDispatch::kAllReduce),
                   "--ep-dispatch all-reduce: 2 replicas of the backbone have tokens of their own: "
                   "choose auto, gather, all-to-all or low-latency"));
  EXPECT_TRUE(says(refused(2, ExpertDispatch::kAllToAll, 4'000'000),
                   "--ep-dispatch all-to-all: the CPU has some experts, so all rows go to all "
                   "ranks: leave it out"));
  EXPECT_TRUE(says(refused(1, ExpertDispatch::kAuto, kEnough, ExpertRows::kFp8),
                   "--ep-rows fp8: no rows travel between ranks: leave it out, or give replicas of "
                   "the backbone (--dp)"));
  EXPECT_EQ(refused(1, ExpertDispatch::kAuto, kEnough, ExpertRows::kExact), "no errorno error");
}

// GPUs of two hosts, whose memory they do not share, and ranks that are dealt to them in turns.
TEST(GpuRanksOfTinyR1, RefuseWhatTheirHostsCannotDo) {
  const LimitedGpuMemory memory(kEnough);
  ModelOptions options = tiny_r1(DeviceChoice::kCuda);
  options.context = 64;
  const ModelConfig config = ModelConfig::from_directory(options.directory);
  const WeightStore store(options.directory);
  ModelWeights stored = stored_weights(store, config);
  const Topology topology = {};
  const cpu::KernelTable kernels = cpu::kernels_for(cpu::Isa::kReference);
  const CpuWeights home(kernels, topology);
  const auto refused = [&](PlacedRank rank, const std::vector<int>& host_of_rank) {
    const Subject subject = {config,  stored, topology, kernels,     home,
                             kEnough, rank,   {},       host_of_rank};
    return error_of([&] { decide(options, subject); });
  };
  options.n_replicas = 2;
  EXPECT_EQ(refused({0, 2, 2}, {0, 0}), "no error");
  options.dispatch = ExpertDispatch::kLowLatency;
  EXPECT_EQ(refused({0, 2, 2}, {0, 0}), "no error");
  EXPECT_EQ(refused({0, 2, 1}, {0, 1}),
            "--ep-dispatch low-latency: the hosts have one GPU each, or not as many as each other: "
            "choose auto, gather or all-to-all");
  const PlacementFile file(backbone_on_gpus(config, 4));
  options = as_placed(options.directory, file);
  EXPECT_TRUE(says(refused({0, 4, 2}, {0, 1, 0, 1}),
                   "places parts on the GPUs of hosts, whose ranks do not follow each other: start "
                   "them with --map-by slot instead of --map-by node"));
  EXPECT_FALSE(says(refused({0, 4, 2}, {0, 0, 1, 1}), "--map-by"));
}

TEST(GpuRanksOfTinyR1, UseTheGpusThatThereAre) {
  const Setting one("TANDEM_GPU_COUNT", "1");
  const auto device_of = [](DeviceChoice device) {
    std::vector<std::string> said(2);
    run_local_ranks({2}, [&](Group& group) {
      try {
        LoadedModel loaded(on_rank(tiny_r1(device), group));
        said[group.rank()] = loaded.device();
      } catch (const AgreedError& error) {
        if (error.reported_here) said[group.rank()] = error.what();
      }
      group.barrier();
    });
    return said;
  };
  const auto refused = device_of(DeviceChoice::kCuda);
  EXPECT_TRUE(says(refused[0] + refused[1], "rank 1, which is number 1 on its host, needs a GPU"));
  EXPECT_EQ(device_of(DeviceChoice::kAuto),
            (std::vector<std::string>{"emulated GPU, other ranks on the cpu",
                                      "cpu, other ranks on GPUs"}));
}

}  // namespace
}  // namespace tandem::test
