// A backbone on the GPU, real or emulated, whose other experts are on workers and move between
// these: the CPU's logits and answers, also in recorded steps and where a worker is lost.
#include <gtest/gtest.h>

#include <algorithm>

#include "gpu_kernels/runtime.h"
#include "tests/expert_moves.h"
#include "tests/golden_file.h"
#include "tests/hybrid_placements.h"
#include "tests/worker_models.h"

namespace tandem::test {
namespace {

using State = MoveStatus::State;

// The least GPU memory, to `step` bytes, with which the GPU has n experts of a layer.
int64_t bytes_for(const ModelOptions& options, int n, int64_t step) {
  int64_t enough = kEnough, less = 0;
  while (enough - less > step) {
    const int64_t middle = (enough + less) / 2;
    const LimitedGpuMemory memory(middle);
    int64_t here = -1;
    error_of([&] {
      const LoadedModel loaded(options);
      for (const std::vector<bool>& layer : loaded.expert_homes().on_gpu)
        here = std::max<int64_t>(here, std::count(layer.begin(), layer.end(), true));
    });
    (here >= n ? enough : less) = middle;
  }
  return enough;
}

LoadedExpertsOptions moving(const std::string& directory) {
  LoadedExpertsOptions options = served(directory, "");
  options.moves_experts = true;
  return options;
}

std::string every_second(int first, int end) {
  std::vector<int> experts;
  for (int e = first; e < end; e += 2) experts.push_back(e);
  return text_of_experts(experts);
}

ModelOptions with_workers(ModelOptions options, const Workers& workers) {
  options = that_moves(std::move(options));
  options.workers.addresses = workers.addresses;
  options.workers.deadline = std::chrono::milliseconds(1500);  // a busy machine is no lost worker
  return options;
}

// What the backbone computes is number 0's, on its GPU also what workers have. Returns how many
// experts are on the GPU.
int64_t expect_fixed_experts_of_gpu(const ExpertHomes& homes) {
  EXPECT_EQ(homes.n_ranks, 3);
  EXPECT_EQ(homes.on_gpu.size(), homes.ranks.size());
  int64_t n = 0;
  for (size_t l = 0; l < homes.on_gpu.size(); ++l)
    for (size_t e = 0; e < homes.on_gpu[l].size(); ++e) {
      if (!homes.on_gpu[l][e]) continue;
      ++n;
      EXPECT_EQ(homes.ranks[l][e], std::vector<int>{0}) << "layer " << l << ", expert " << e;
    }
  return n;
}

class HybridWorkerMoves : public testing::TestWithParam<std::string> {};

TEST_P(HybridWorkerMoves, GiveTheCpusLogits) {
  if (!gpu::open_gpu().emulated) GTEST_SKIP() << "the memory of a GPU is what it is";
  const std::string directory = kGolden + GetParam();
  const int n = ModelConfig::from_directory(directory).router.n_experts;
  const std::vector<int32_t> tokens =
      GoldenFile(directory + "/golden.safetensors").ints("tokens_17");
  ModelOptions options = {.directory = directory,
                          .isa = cpu::Isa::kReference,
                          .n_threads = 1,
                          .context = kContext,
                          .max_logits = 40};
  LoadedModel cpu(options);
  const Logits want = logits_after(cpu, tokens);
  options.device = DeviceChoice::kCuda;
  LoadedExpertsOptions of_worker = moving(directory);
  of_worker.isa = options.isa;
  struct Division {
    int n_on_gpu;                      // of a layer
    std::vector<std::string> workers;  // the process has what is left on its CPU
  };
  // A GPU has the first experts, and each worker has some of the others.
  const Division divisions[] = {{3, {every_second(0, n), every_second(1, n)}},
                                {2, {every_second(0, n - 2), every_second(1, n - 2)}},
                                {0, {every_second(0, n), every_second(1, n)}}};
  for (const auto& [n_on_gpu, experts] : divisions) {
    SCOPED_TRACE(fmt::format("{} on the GPU, {}", n_on_gpu, fmt::join(experts, " | ")));
    const LimitedGpuMemory memory(bytes_for(options, n_on_gpu, 1000));
    const Workers workers(of_worker, experts);
    LoadedModel loaded(with_workers(options, workers));
    EXPECT_TRUE(says(loaded.device(), "experts also on workers"));
    EXPECT_EQ(expect_fixed_experts_of_gpu(loaded.expert_homes()) > 0, n_on_gpu > 0);
    Engine engine = moving_engine(loaded, {.plan = random_plan(n)}, 32);
    int64_t n_moved = 0;
    for (int round = 0; round < 4; ++round) {
      Logits logits;
      submit_text(engine, tokens, logits);
      run_to_end(engine);
      expect_close_logits(logits, want, 2e-2);
      n_moved += move_now(engine);
      expect_fixed_experts_of_gpu(*engine.expert_homes());
    }
    EXPECT_GT(n_moved, 0);
    EXPECT_EQ(engine.expert_homes()->on_gpu, loaded.expert_homes().on_gpu);
    for (const WorkerStatus& worker : loaded.model().workers())
      EXPECT_EQ(worker.n_failures, 0) << worker.address;
  }
}

INSTANTIATE_TEST_SUITE_P(Families, HybridWorkerMoves, testing::Values("v3_fp8", "v2_lite"),
                         [](const auto& info_of) { return info_of.param; });

class HybridWorkerMovesOfTinyR1 : public testing::Test {
 protected:
  void SetUp() override {
    if (!gpu::open_gpu().emulated) GTEST_SKIP() << "the memory of a GPU is what it is";
  }
  static int64_t bytes_for_some() {
    static const int64_t bytes = bytes_for(tiny_r1(DeviceChoice::kCuda), 6, 20'000);
    return bytes;
  }
};

// Answers to questions while `move` is called between steps.
std::vector<std::vector<int32_t>> answers_while(Engine& engine, int n,
                                                const std::function<void()>& move) {
  const Tokenizer tokenizer = Tokenizer::from_directory(kTinyR1);
  std::vector<std::vector<int32_t>> tokens;
  submit_all(engine, questions(kTinyR1, tokenizer, n), tokens);
  for (bool computes = true; computes || is_busy(engine);) {
    computes = step_or_wait(engine);
    if (!is_busy(engine) && engine.expert_uses()->n_steps > 0) move();
  }
  return tokens;
}

// Recorded decode steps are replayed before, between and after moves.
TEST_F(HybridWorkerMovesOfTinyR1, AnswersStayWhileStepsAreReplayed) {
  constexpr int kAnswers = 4, kMoves = 6;
  const std::vector<std::vector<int32_t>> want = answers(tiny_r1(DeviceChoice::kCpu), kAnswers);
  const LimitedGpuMemory memory(bytes_for_some());
  const Workers workers(moving(kTinyR1), {every_second(0, 16), every_second(1, 16)});
  for (const int micro_batches : {1, 2}) {
    ModelOptions options = with_workers(tiny_r1(DeviceChoice::kCuda), workers);
    options.micro_batches = micro_batches;
    options.max_logits = 8;
    LoadedModel loaded(options);
    Engine engine = moving_engine(loaded, {.plan = random_plan(micro_batches)});
    int n_begun = 0;
    int64_t n_moved = 0;
    const auto move = [&] {
      const RebalanceReport report = engine.rebalance_report();
      EXPECT_EQ(report.error, "");
      n_moved += report.n_experts;
      if (n_begun == kMoves) return;
      ++n_begun;
      EXPECT_TRUE(engine.rebalance());
    };
    EXPECT_EQ(answers_while(engine, kAnswers, move), want);
    EXPECT_GE(n_begun, 2);
    EXPECT_GT(n_moved, 0);
    EXPECT_EQ(answers_while(engine, kAnswers, [] {}), want);
  }
}

// Exchanges two experts of a layer that workers 1 and 2 have.
std::vector<ExpertChange> exchange(const ExpertHomes& homes) {
  for (size_t l = 0; l < homes.ranks.size(); ++l) {
    int of_worker[] = {-1, -1};
    for (size_t e = 0; e < homes.ranks[l].size(); ++e)
      for (const int w : {1, 2})
        if (homes.ranks[l][e] == std::vector{w}) of_worker[w - 1] = static_cast<int>(e);
    const auto layer = static_cast<int32_t>(l);
    if (of_worker[0] >= 0 && of_worker[1] >= 0)
      return {{layer, of_worker[0], {2}}, {layer, of_worker[1], {1}}};
  }
  ADD_FAILURE() << "no experts that may move";
  return {};
}

// Steps are replayed after each loss; the worker that comes back has its command line's experts.
TEST_F(HybridWorkerMovesOfTinyR1, AWorkerIsLostInEachPhase) {
  constexpr int kAnswers = 2;
  const std::vector<std::vector<int32_t>> want = answers(tiny_r1(DeviceChoice::kCpu), kAnswers);
  const LimitedGpuMemory memory(bytes_for_some());
  Workers workers(moving(kTinyR1), {every_second(0, 16), every_second(1, 16)});
  ModelOptions options = with_workers(tiny_r1(DeviceChoice::kCuda), workers);
  options.workers.patience = std::chrono::seconds(30);
  LoadedModel loaded(options);
  StepRunner& model = loaded.model();
  const Tokenizer tokenizer = Tokenizer::from_directory(kTinyR1);
  Engine engine = engine_for(loaded, tokenizer);
  const auto expect_answers = [&] {
    std::vector<std::vector<int32_t>> got;
    for (const Completion& c : complete(engine, questions(kTinyR1, tokenizer, kAnswers)))
      got.push_back(c.tokens);
    EXPECT_EQ(got, want);
  };
  const auto lose = [&] {
    workers.threads[1].reset();
    while (model.workers()[1].is_up) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  };
  const auto await = [&](State left) {
    while (model.move_status()[0].state == left)
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    return model.move_status()[0];
  };
  ExpertHomes homes = loaded.expert_homes();
  enum class Phase { kPlanned, kLoaded, kMoved };
  for (const Phase phase : {Phase::kPlanned, Phase::kLoaded, Phase::kMoved}) {
    SCOPED_TRACE(static_cast<int>(phase));
    if (const auto fresh = model.mover()->new_homes()) homes = *fresh;
    const std::vector<ExpertChange> changes = exchange(homes);
    if (phase == Phase::kPlanned) lose();
    model.load_experts(changes);
    MoveStatus status = await(State::kLoading);
    if (phase != Phase::kPlanned) {
      EXPECT_EQ(status.state, State::kLoaded) << status.why.data();
      if (phase == Phase::kLoaded) lose();
      model.move_experts();
      status = model.move_status()[0];
    }
    if (phase == Phase::kMoved) {
      EXPECT_EQ(status.state, State::kIdle) << status.why.data();
      lose();
    } else {
      EXPECT_EQ(status.state, State::kFailed);
      EXPECT_EQ(std::string(status.why.data()), "worker " + workers.addresses[1] + " was lost");
      model.keep_experts();
      EXPECT_EQ(await(State::kLoading).state, State::kIdle);
    }
    LoadedExpertsOptions again = moving(kTinyR1);
    again.experts = every_second(1, 16);
    workers.threads[1] = std::make_unique<WorkerThread>(
        again, ExpertServer::Options{.address = workers.addresses[1]});
    expect_answers();  // its first step waits for the worker
  }
}

// The plan is of what workers compute: uses of experts on the GPU are not theirs.
TEST_F(HybridWorkerMovesOfTinyR1, ThePlanEvensOutWhatWorkersCompute) {
  const LimitedGpuMemory memory(bytes_for_some());
  const Workers workers(moving(kTinyR1), {every_second(0, 16), every_second(1, 16)});
  ModelOptions options = with_workers(tiny_r1(DeviceChoice::kCuda), workers);
  options.max_logits = 8;
  LoadedModel loaded(options);
  const ExpertHomes& homes = loaded.expert_homes();
  ExpertUses uses = {.n_steps = 1, .n_tokens = 1, .of_layer = {}};
  for (const std::vector<std::vector<int>>& layer : homes.ranks) {
    std::vector<int64_t>& counts = uses.of_layer.emplace_back();
    for (size_t e = 0; e < layer.size(); ++e)
      counts.push_back(layer[e] == std::vector{0} ? 1'000'000 : layer[e] == std::vector{1} ? 3 : 1);
  }
  const double of_gpu = loads_of(uses, homes).of_rank[0];
  EXPECT_GT(of_gpu, 0);
  EXPECT_TRUE(is_uneven(uses, homes, 0.8));
  const RebalancePlan plan = plan_for(uses, homes);
  EXPECT_NEAR(plan.before, 4.0 / 6, 0.1);
  EXPECT_GT(plan.after, 0.9);
  ExpertHomes after = homes;
  for (const std::vector<ExpertChange>& wave : plan.waves) {
    after.apply(wave);
    for (const ExpertChange& change : wave)
      EXPECT_FALSE(homes.on_gpu[change.layer][change.expert]) << change.expert;
  }
  EXPECT_EQ(after.on_gpu, homes.on_gpu);
  EXPECT_EQ(loads_of(uses, after).of_rank[0], of_gpu);
  EXPECT_FALSE(is_uneven(uses, after, 0.9));
}

TEST_F(HybridWorkerMovesOfTinyR1, TwoWorkersOrMoreAreNeeded) {
  const LimitedGpuMemory memory(bytes_for_some());
  const Workers some(moving(kTinyR1), {"0-7"}), others(served(kTinyR1, ""), {"8-15"});
  ModelOptions options = with_workers(tiny_r1(DeviceChoice::kCuda), some);
  options.workers.addresses.push_back(others.addresses[0]);
  EXPECT_TRUE(says(error_of([&] { LoadedModel loaded(options); }),
                   "--rebalance: experts move between two or more workers that are started with "
                   "--experts-move, and of these 2 1 is so"));
}

}  // namespace
}  // namespace tandem::test
