// A backbone on the GPU, real or emulated, and experts on both devices: the logits are the CPU's,
// wherever experts and embedding are.
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <random>

#include "cli/conversation.h"
#include "cli/options.h"
#include "gpu_kernels/runtime.h"
#include "offload/plan/placement_json.h"
#include "tests/error_of.h"
#include "tests/golden_file.h"
#include "tests/hybrid_placements.h"
#include "tests/plain_engine.h"
#include "tests/whole_models.h"
#include "text/chat_format.h"

namespace tandem::test {
namespace {

// The longest golden prompt of the model.
std::vector<int32_t> golden_tokens(const std::string& directory) {
  const GoldenFile golden(directory + "/golden.safetensors");
  for (const char* name : {"tokens_40", "tokens_17", "tokens_5"})
    if (golden.has(name)) return golden.ints(name);
  return {};
}

class Hybrid : public testing::TestWithParam<std::string> {};

// Compares with float kernels, within the bound of a model that is entirely on the GPU
// (gpu_engine_test).
TEST_P(Hybrid, RandomPlacementsGiveTheCpusLogits) {
  const LimitedGpuMemory memory(kEnough);
  const std::string directory = kGolden + GetParam();
  const std::vector<int32_t> tokens = golden_tokens(directory);
  ASSERT_GE(tokens.size(), 5u);
  LoadedModel cpu({.directory = directory,
                   .isa = cpu::Isa::kReference,
                   .n_threads = 1,
                   .context = kContext,
                   .max_logits = 40});
  const auto want = logits_after(cpu, tokens);
  std::mt19937 rng(static_cast<unsigned>(std::hash<std::string>()(GetParam())));
  // Packed INT4 and FP16 are not streamed.
  const bool may_stream = GetParam() != "kimi_k2_thinking" && GetParam() != "moonlight_tied";
  constexpr int kRounds = 3;
  int n_shared = 0;
  for (int round = 0; round < kRounds; ++round) {
    const Placement placement = random_placement(cpu.config(), rng, may_stream);
    const std::string text = placement_to_json(placement).dump();
    SCOPED_TRACE(text);
    const PlacementFile file(placement);
    LoadedModel loaded({.directory = directory,
                        .device = DeviceChoice::kCuda,
                        .n_threads = 1,
                        .max_logits = 40,
                        .placement = file.path()});
    n_shared += says(loaded.device(), "experts also on the cpu");
    expect_close_logits(logits_after(loaded, tokens), want, 2e-2);
  }
  EXPECT_GE(n_shared, 1);
}

INSTANTIATE_TEST_SUITE_P(Families, Hybrid, testing::ValuesIn(families_without_ties(kGolden)),
                         [](const auto& info_of) { return info_of.param; });

TEST(HybridEngine, TinyR1AnswersAsOnTheCpu) {
  const LimitedGpuMemory memory(kEnough);
  ModelOptions options = tiny_r1(DeviceChoice::kCuda);
  std::mt19937 rng(3);
  const ModelConfig config = ModelConfig::from_directory(options.directory);
  Placement placement = random_placement(config, rng);
  placement.kv_tokens = options.context;
  placement.prefill_chunk_tokens = 17;
  placement.micro_batches = 2;
  const auto want = answers(tiny_r1(DeviceChoice::kCpu), 3);
  for (const int stream_from : {0, 9}) {
    placement.stream_from_tokens = stream_from;
    const PlacementFile file(placement);
    options.placement = file.path();
    EXPECT_EQ(answers(options, 3), want) << "streamed from " << stream_from << " tokens on";
  }
}

// Covers chunked prompts, some of them streamed, and decode steps, recorded or not, with experts on
// both devices and with all on the GPU. The routers' own counts are those of the pool's observer.
TEST(HybridEngine, RoutingIsCountedAsOnTheCpu) {
  const LimitedGpuMemory memory(kEnough);
  ModelOptions options = tiny_r1(DeviceChoice::kCpu);
  options.record_routing = options.count_experts = true;
  GenerateOptions generate;
  const auto counts = [&generate](const ModelOptions& of) {
    LoadedModel loaded(of);
    EXPECT_EQ(says(loaded.device(), "experts also on the cpu"), !of.placement.empty());
    const Tokenizer tokenizer = Tokenizer::from_directory(of.directory);
    const ChatFormat format(of.directory, tokenizer);
    generate.max_new_tokens = 6;
    generate.sampling.temperature = 0;
    const std::vector<int32_t> prompt = format.prompt(first_messages("", "What is 12 + 7?"));
    Engine engine = engine_for(loaded, tokenizer);
    const Answer answer = tandem::generate(
        engine, tokenizer, make_request(generate, tokenizer, prompt), {}, [](auto) {});
    EXPECT_GE(answer.completion.tokens.size(), 2u);
    const auto n_experts = loaded.config().router.n_experts;
    std::vector<uint32_t> uses(size_t(loaded.config().n_all_layers()) * n_experts);
    loaded.model().read_expert_uses(uses);
    for (int layer = 0; layer < loaded.config().n_layers; ++layer) {
      const std::vector<int64_t>& recorded = loaded.routing()->of_layer[layer];
      const auto own = std::span(uses).subspan(size_t(layer) * n_experts, n_experts);
      EXPECT_TRUE(recorded.empty() ? std::ranges::count(own, 0u) == n_experts
                                   : std::ranges::equal(own, recorded))
          << "layer " << layer;
    }
    return loaded.routing()->of_layer;
  };
  const auto expect_same_counts = [&](ModelOptions on_gpu, const std::string& placement) {
    ModelOptions on_cpu = options;
    on_cpu.simulated_routing = on_gpu.simulated_routing;
    const auto want = counts(on_cpu);
    on_gpu.device = DeviceChoice::kCuda;
    EXPECT_EQ(counts(on_gpu), want);
    on_gpu.placement = placement;
    EXPECT_EQ(counts(on_gpu), want);
  };
  std::mt19937 rng(3);
  Placement placement = random_placement(ModelConfig::from_directory(options.directory), rng);
  placement.kv_tokens = options.context;
  placement.prefill_chunk_tokens = 9;
  placement.stream_from_tokens = 6;
  const PlacementFile file(placement);
  expect_same_counts(options, file.path());
  generate.ignore_eos = true;           // simulated routing makes texts that differ
  placement.prefill_chunk_tokens = 64;  // a token's experts depend on its number in the step
  const PlacementFile whole_prompts(placement);
  for (const char* simulated : {"balanced-ranks:5", "balanced-experts", "grouped-random"}) {
    SCOPED_TRACE(simulated);
    options.simulated_routing = simulated_routing(simulated);
    expect_same_counts(options, whole_prompts.path());
  }
}

// Without a placement the GPU gets as many experts as fit, down to none.
TEST(HybridEngine, ASmallGpuGetsWhatFits) {
  constexpr int64_t kStep = 1'000'000;
  const gpu::GpuInfo info = gpu::open_gpu();
  const ModelOptions options = tiny_r1(DeviceChoice::kCuda);
  const auto want = answers(tiny_r1(DeviceChoice::kCpu), 1);
  const auto device_with = [&](int64_t bytes) {  // empty: refused
    const LimitedGpuMemory memory(bytes);
    std::string device;
    error_of([&] { device = LoadedModel(options).device(); });
    return device;
  };
  ASSERT_EQ(device_with(kEnough), info.name);
  int64_t whole = kEnough, less = 0;  // the model fits with `whole` bytes and not with `less`
  while (whole - less > kStep) {
    const int64_t middle = (whole + less) / 2;
    (device_with(middle) == info.name ? whole : less) = middle;
  }
  int n_shared = 0, n_refused = 0;
  for (int64_t bytes = less; n_refused == 0 && bytes > 0; bytes -= kStep) {
    const std::string device = device_with(bytes);
    n_refused += device.empty();
    if (!says(device, "experts also on the cpu") || n_shared++ > 0) continue;
    const LimitedGpuMemory memory(bytes);
    EXPECT_EQ(answers(options, 1), want);
  }
  EXPECT_GE(n_refused, 1);
  // A real GPU needs memory for streamed experts, more than all experts of this small model.
  if (info.emulated) {
    EXPECT_GE(n_shared, 1);
  }
}

TEST(HybridEngine, ImpossiblePlacementsAreRefused) {
  const std::string directory = kGolden + "v3_fp8";
  const ModelConfig config = ModelConfig::from_directory(directory);
  std::mt19937 rng(1);
  const Placement sound = random_placement(config, rng);
  const auto refusal = [&](const Placement& placement, DeviceChoice device) {
    const PlacementFile file(placement);
    return error_of([&] {
      LoadedModel loaded({.directory = directory, .device = device, .placement = file.path()});
    });
  };
  Placement edited = sound;
  EXPECT_TRUE(says(refusal(sound, DeviceChoice::kCpu),
                   "host0.gpu0: this program runs them on host0.cpu only"));
  {
    const LimitedGpuMemory memory(1'000'200'000);  // 200 KB beside the driver's share
    EXPECT_TRUE(says(refusal(sound, DeviceChoice::kCuda), "placement: host0.gpu0 holds 1.00 GB"));
  }
  const LimitedGpuMemory memory(kEnough);
  edited.stages[0].devices = {kCpu};
  edited.embedding_on_cpu = true;
  for (LayerExperts& layer : edited.layers)
    for (ExpertGroup& group : layer.groups) group.owners = {kCpu};
  EXPECT_TRUE(says(refusal(edited, DeviceChoice::kCuda), "is on the CPU: use --device cpu"));
}

}  // namespace
}  // namespace tandem::test
