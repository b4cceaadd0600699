// Experts that a GPU, real or emulated, and the CPU beside it exchange while an engine answers.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "io/weight_store.h"
#include "loader/gpu_model.h"
#include "model/checkpoint.h"
#include "model/cost.h"
#include "offload/balance/hot_experts.h"
#include "tests/error_of.h"
#include "tests/expert_moves.h"
#include "tests/golden_file.h"
#include "tests/hybrid_placements.h"
#include "tests/whole_models.h"

namespace tandem::test {
namespace {

ModelOptions on_gpu(const std::string& directory, const PlacementFile& placement) {
  return that_moves({.directory = directory,
                     .device = DeviceChoice::kCuda,
                     .n_threads = 1,
                     .max_logits = 64,
                     .placement = placement.path()});
}

class HotExperts : public testing::TestWithParam<std::string> {};

// With streamed prompts too, and with experts that the CPU keeps in another format.
TEST_P(HotExperts, TheCpusLogitsStay) {
  const LimitedGpuMemory memory(kEnough);
  const std::string directory = kGolden + GetParam();
  const GoldenFile golden(directory + "/golden.safetensors");
  const std::vector<int32_t> tokens =
      golden.ints(golden.has("tokens_17") ? "tokens_17" : "tokens_5");
  LoadedModel cpu({.directory = directory,
                   .isa = cpu::Isa::kReference,
                   .n_threads = 1,
                   .context = kContext,
                   .max_logits = 40});
  const Logits want = logits_after(cpu, tokens);
  std::mt19937 random(static_cast<unsigned>(std::hash<std::string>()(GetParam())));
  const bool may_stream = GetParam() != "kimi_k2_thinking" && GetParam() != "moonlight_tied";
  int64_t n_moved = 0;
  for (int round = 0; round < 2; ++round) {
    const PlacementFile file(random_placement(cpu.config(), random, may_stream));
    ModelOptions options = on_gpu(directory, file);
    std::optional<LoadedModel> loaded;
    try {
      loaded.emplace(options);
    } catch (const Error& error) {
      EXPECT_TRUE(says(error.what(), "the GPU has all experts")) << error.what();
      continue;
    }
    Engine engine = moving_engine(*loaded, {.plan = random_plan(round)}, 32);
    for (int i = 0; i < 3; ++i) {
      Logits logits;
      submit_text(engine, tokens, logits);
      run_to_end(engine);
      expect_close_logits(logits, want, 2e-2);
      n_moved += move_now(engine);
    }
  }
  EXPECT_GT(n_moved, 0);
}

INSTANTIATE_TEST_SUITE_P(Families, HotExperts, testing::ValuesIn(families_without_ties(kGolden)),
                         [](const auto& info_of) { return info_of.param; });

// A quarter of each layer's experts on the GPU.
Placement quarter_on_gpu(const ModelConfig& c) {
  Placement p = backbone_on_gpu(c, kContext);
  for (int l = 0; l < c.n_layers; ++l) {
    if (!c.is_moe(l)) continue;
    LayerExperts layer = {l, l, {}};
    for (const bool gpu : {true, false}) {
      ExpertGroup group = {{}, stored_expert_format(c), {gpu ? kGpu : kCpu}};
      for (int e = 0; e < c.router.n_experts; ++e)
        if ((e % 4 == 0) == gpu) group.experts.push_back(e);
      layer.groups.push_back(group);
    }
    p.layers.push_back(layer);
  }
  return p;
}

// Answers to questions in recorded decode steps, while experts move `n_moves` times.
std::vector<std::vector<int32_t>> answers_while(const ModelOptions& options, int n_moves) {
  LoadedModel loaded(options);
  Engine engine = moving_engine(loaded, {.plan = random_plan(2)}, 4);
  const Tokenizer tokenizer = Tokenizer::from_directory(kTinyR1);
  const std::vector<Request> asked = questions(kTinyR1, tokenizer, 4);
  std::vector<std::vector<int32_t>> answers(asked.size());
  for (size_t i = 0; i < asked.size(); ++i) {
    EngineRequest request;
    request.request = asked[i];
    request.on_event = [&answer = answers[i]](const TokenEvent& event) {
      if (event.token) answer.push_back(*event.token);
      return true;
    };
    engine.submit(std::move(request));
  }
  int64_t n_experts = 0;
  int n_begun = 0;
  for (bool computes = true; computes || is_busy(engine);) {
    computes = step_or_wait(engine);
    if (is_busy(engine) || n_begun == n_moves) continue;
    n_experts += engine.rebalance_report().n_experts;
    EXPECT_TRUE(engine.rebalance());
    ++n_begun;
  }
  EXPECT_EQ(n_experts > 0, n_moves > 0);
  return answers;
}

TEST(HotExpertsOfTinyR1, MoveInAnswersWithoutChangingThem) {
  const LimitedGpuMemory memory(kEnough);
  const PlacementFile file(quarter_on_gpu(ModelConfig::from_directory(kTinyR1)));
  EXPECT_EQ(answers_while(on_gpu(kTinyR1, file), 20), answers_while(on_gpu(kTinyR1, file), 0));
}

// The uses of a window shift to other experts: the GPU follows them.
TEST(HotExpertsOfTinyR1, FollowUse) {
  const LimitedGpuMemory memory(kEnough);
  const PlacementFile file(quarter_on_gpu(ModelConfig::from_directory(kTinyR1)));
  LoadedModel loaded(on_gpu(kTinyR1, file));
  Engine engine = moving_engine(loaded, {.is_due =
                                             [](const ExpertUses& uses, const ExpertHomes& homes) {
                                               return misses_hot_experts(uses, homes, 1);
                                             },
                                         .period = std::chrono::seconds(0)});
  std::mt19937 random(3);
  for (int topic = 0; topic < 2; ++topic) {
    const auto first = static_cast<int32_t>(20 + 100 * topic);
    const auto read = [&] {
      EngineRequest request;
      for (int i = 0; i < 24; ++i)
        request.request.prompt.push_back(first + static_cast<int32_t>(random() % 8));
      request.request.max_new_tokens = 1;
      request.on_event = [](const TokenEvent&) { return true; };
      engine.submit(std::move(request));
      run_to_end(engine);
    };
    for (int i = 0; i < 9; ++i) read();  // more than a window
    const ExpertLoads loads = loads_of(*engine.expert_uses(), *engine.expert_homes());
    double best = 0, all = 0;
    for (std::vector<int64_t> of_layer : engine.expert_uses()->of_layer) {
      std::ranges::sort(of_layer, std::greater<>());
      for (size_t e = 0; e < of_layer.size(); ++e) {
        all += static_cast<double>(of_layer[e]);
        if (e < of_layer.size() / 4) best += static_cast<double>(of_layer[e]);
      }
    }
    EXPECT_GE(loads.gpu_share, 0.9 * best / all) << "topic " << topic;
  }
  EXPECT_GE(engine.rebalance_report().number, 2);
}

TEST(HotExpertsOfTinyR1, HaveRoomThatIsPlanned) {
  const ModelConfig config = ModelConfig::from_directory(kTinyR1);
  const WeightStore store(kTinyR1);
  ModelWeights stored = stored_weights(store, config);
  const auto other_bytes = [&](bool moves, const GpuParts& parts) {
    GpuModelOptions options;
    options.moves_experts = moves;
    return gpu_memory(stored, config, options).other_bytes(parts, 64, 64);
  };
  const int64_t expert = 3 * (128 * 128 + 64);  // FP8 with a scale, padded
  GpuParts parts = evenly_on_gpu(config, 5);
  EXPECT_EQ(other_bytes(true, parts) - other_bytes(false, parts), kHotExpertsAtOnce * expert);
  parts.on_other_ranks = parts.experts;  // between ranks a whole layer may move
  EXPECT_EQ(other_bytes(true, parts) - other_bytes(false, parts), 3 * expert);
}

TEST(PlanHotExperts, ExchangesTheHottestForTheColdest) {
  SharedLayer layer = {3, {true, true, false, false, false, false}, {10, 1, 9, 20, 1, 0}};
  const RebalancePlan plan = plan_hot_experts(std::span(&layer, 1), 1);
  ASSERT_EQ(plan.waves.size(), 1u) << "9 is not hotter than 10";
  EXPECT_EQ(plan.waves[0], (std::vector<ExpertChange>{{3, 3, {kGpuOwner}}, {3, 1, {kHostOwner}}}));
  EXPECT_DOUBLE_EQ(plan.before, 11.0 / 41);
  EXPECT_DOUBLE_EQ(plan.after, 30.0 / 41);
  EXPECT_EQ(plan.n_layers, 1);
  EXPECT_EQ(plan.n_arrivals, 2);
  layer.use = {10, 10, 10.9, 10.5, 9, 0};
  EXPECT_TRUE(plan_hot_experts(std::span(&layer, 1), 1).waves.empty()) << "noise moves nothing";
  layer.use = {0, 0, 0, 0, 0, 0};
  EXPECT_TRUE(plan_hot_experts(std::span(&layer, 1), 1).waves.empty());
}

TEST(PlanHotExperts, ExchangesOfEqualGainKeepTheOrderOfLayers) {
  std::vector<SharedLayer> layers;
  for (const int layer : {1, 2, 3, 4}) layers.push_back({layer, {true, false}, {1, 5}});
  const RebalancePlan plan = plan_hot_experts(layers, 1);
  ASSERT_EQ(plan.waves.size(), 4u);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(plan.waves[i][0].layer, i + 1);
}

TEST(PlanHotExperts, ReachesTheBestShareInWavesThatFit) {
  std::mt19937 random(4);
  for (int round = 0; round < 50; ++round) {
    std::vector<SharedLayer> layers;
    for (int l = 0; l < 6; ++l) {
      SharedLayer& layer = layers.emplace_back(SharedLayer{l, {}, {}});
      for (int e = 0; e < 24; ++e) {
        layer.on_gpu.push_back(random() % (l + 1) == 0);
        layer.use.push_back(static_cast<double>(int64_t{1} << random() % 12));
      }
    }
    const GpuShareOfUses share = gpu_share_of_uses(layers);
    const RebalancePlan plan = plan_hot_experts(layers, 5);
    EXPECT_NEAR(plan.before, share.now, 1e-12);
    EXPECT_NEAR(plan.after, share.best, 1e-9) << "uses differ by factors of 2";
    double last_gain = 1e30;
    for (const std::vector<ExpertChange>& wave : plan.waves) {
      EXPECT_LE(wave.size(), 10u);
      double gain = 0;
      for (const ExpertChange& change : wave) {
        SharedLayer& layer = layers[change.layer];
        const bool to_gpu = change.ranks == std::vector<int32_t>{kGpuOwner};
        EXPECT_NE(layer.on_gpu[change.expert], to_gpu);
        layer.on_gpu[change.expert] = to_gpu;
        gain += (to_gpu ? 1 : -1) * layer.use[change.expert];
      }
      EXPECT_LE(gain / (wave.size() / 2), last_gain) << "what brings most comes first";
      last_gain = gain / (wave.size() / 2);
    }
    EXPECT_NEAR(gpu_share_of_uses(layers).now, share.best, 1e-9);
  }
}

}  // namespace
}  // namespace tandem::test
