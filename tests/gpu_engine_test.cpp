// The whole engine on a GPU, real or emulated: golden logits of every family, tiny-r1's answers,
// sampling on the GPU. gpu_engine_batches_test covers batch compositions.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "cli/conversation.h"
#include "gpu_kernels/runtime.h"
#include "tests/check_close.h"
#include "tests/error_of.h"
#include "tests/golden_file.h"
#include "tests/hybrid_placements.h"
#include "tests/plain_engine.h"
#include "tests/whole_models.h"

namespace tandem::test {
namespace {

struct GoldenForm {
  std::string family;
  AttentionForm form;
};

// t1 is omitted: it has near ties between experts that a BF16 cache decides differently.
std::vector<GoldenForm> golden_forms() {
  std::vector<GoldenForm> all;
  for (const std::string& family : golden_families(kGolden))
    for (const AttentionForm form : {AttentionForm::kNaive, AttentionForm::kAbsorbed})
      if (family != "t1") all.push_back({family, form});
  return all;
}

class GpuGolden : public testing::TestWithParam<GoldenForm> {};

TEST_P(GpuGolden, LogitsOfShortPrompts) {
  const GoldenForm& c = GetParam();
  LoadedModel loaded({.directory = kGolden + c.family,
                      .device = DeviceChoice::kCuda,
                      .n_threads = 1,
                      .context = 64,
                      .max_logits = 40,
                      .attention = c.form});
  EXPECT_NE(loaded.device(), "cpu");
  const GoldenFile golden(kGolden + c.family + "/golden.safetensors");
  const size_t vocab = loaded.config().vocab;
  int n_compared = 0;
  for (const int length : {1, 5, 17, 40}) {
    const std::string suffix = "_" + std::to_string(length);
    if (!golden.has("tokens" + suffix)) continue;
    const std::vector<int32_t> tokens = golden.ints("tokens" + suffix);
    const std::vector<float> want = golden.floats("logits" + suffix);
    const int64_t first = length - static_cast<int64_t>(want.size() / vocab);
    score(loaded.model(), loaded.cache(), tokens, first,
          [&](int64_t i, std::span<const float> got) {
            SCOPED_TRACE(testing::Message() << length << " tokens, position " << i);
            const std::span<const float> row(want.data() + (i - first) * vocab, vocab);
            expect_close(got, row, 2e-2 * largest(row));
            ++n_compared;
          });
  }
  EXPECT_GE(n_compared, 10);
}

INSTANTIATE_TEST_SUITE_P(Families, GpuGolden, testing::ValuesIn(golden_forms()),
                         [](const auto& info_of) {
                           const GoldenForm& c = info_of.param;
                           return c.family +
                                  (c.form == AttentionForm::kNaive ? "_naive" : "_absorbed");
                         });

TEST(GpuEngine, TinyR1AnswersAsOnTheCpu) {
  EXPECT_EQ(answers(tiny_r1(DeviceChoice::kCuda), 5), answers(tiny_r1(DeviceChoice::kCpu), 5));
}

// The largest error of the logits with latents in FP8, relative to the largest logit; negative if
// the model is refused.
double error_of_fp8_cache(const std::string& family) {
  ModelOptions options = {.directory = kGolden + family,
                          .device = DeviceChoice::kCuda,
                          .n_threads = 1,
                          .context = 64,
                          .max_logits = 40,
                          .kv = DType::kF8E4M3};
  std::unique_ptr<LoadedModel> loaded;
  if (says(error_of([&] { loaded = std::make_unique<LoadedModel>(options); }), "--kv bf16"))
    return -1;
  const GoldenFile golden(kGolden + family + "/golden.safetensors");
  const auto tokens = golden.ints("tokens_17");
  const auto want = golden.floats("logits_17");
  const size_t vocab = loaded->config().vocab;
  const int64_t first = 17 - static_cast<int64_t>(want.size() / vocab);
  double most = 0;
  score(loaded->model(), loaded->cache(), tokens, first,
        [&](int64_t i, std::span<const float> got) {
          const std::vector<float> row(want.begin() + (i - first) * vocab,
                                       want.begin() + (i - first + 1) * vocab);
          const double off = largest_difference({got.begin(), got.end()}, row) / largest(row);
          most = std::max(most, off) + 0 * off;
        });
  return most;
}

void expect_a_placement_to_decide(ModelOptions options) {
  const LimitedGpuMemory memory(kEnough);
  std::mt19937 rng(1);
  Placement placement = random_placement(ModelConfig::from_directory(options.directory), rng);
  placement.kv_tokens = options.context;
  placement.kv_type = DType::kF8E4M3;
  const PlacementFile file(placement);
  options.placement = file.path();
  options.kv.reset();
  EXPECT_EQ(LoadedModel(options).cache().layer(0).dtype, DType::kF8E4M3);
  options.kv = DType::kBF16;
  EXPECT_TRUE(says(error_of([&] { LoadedModel model(options); }), "another type of KV cache"));
}

// In models with random weights a near tie of experts may change the choice, and a logit may then
// differ much.
TEST(GpuEngine, AnFp8CacheCostsLittle) {
  int n = 0, n_near = 0;
  for (const std::string& family : families_without_ties(kGolden)) {
    const double off = error_of_fp8_cache(family);
    std::printf("FP8 cache, %s: %.4f of the largest logit\n", family.c_str(), off);
    if (off < 0) continue;
    ++n;
    n_near += off < 0.1;
    EXPECT_LT(off, 0.4) << family;
    EXPECT_GT(off, 0) << family;
  }
  EXPECT_GE(n, 9);
  EXPECT_GE(n_near, 7);

  ModelOptions options = tiny_r1(DeviceChoice::kCuda);
  const auto with_bf16 = answers(options, 2);
  options.kv = DType::kF8E4M3;
  EXPECT_EQ(answers(options, 2), with_bf16);
  expect_a_placement_to_decide(options);
  options.device = DeviceChoice::kCpu;
  EXPECT_TRUE(says(error_of([&] { LoadedModel model(options); }), "--device cuda"));
}

// Compares the GPU's tokens with the host's in the same steps, where log-probabilities are
// requested.
TEST(GpuEngine, SampledTokensAreThoseOfTheHost) {
  ModelOptions options = tiny_r1(DeviceChoice::kCuda);
  options.max_logits = 4;
  LoadedModel loaded(options);
  const Tokenizer tokenizer = Tokenizer::from_directory(options.directory);
  std::vector<Request> requests;
  for (const uint64_t seed : {1, 2})
    for (const int n_top_logprobs : {-1, 0}) {
      Request& r = requests.emplace_back();
      r.prompt = {1, 50, 60, 70};
      r.max_new_tokens = 12;
      SamplingParams& p = r.sampling;
      p.temperature = 0.6f;
      p.top_p = 0.95f;
      p.seed = seed;
      p.n_top_logprobs = n_top_logprobs;
    }
  Engine engine = engine_for(loaded, tokenizer);
  const std::vector<Completion> made = complete(engine, requests);
  EXPECT_EQ(made[0].tokens.size(), 12u);
  EXPECT_EQ(made[0].tokens, made[1].tokens);
  EXPECT_EQ(made[2].tokens, made[3].tokens);
  EXPECT_NE(made[0].tokens, made[2].tokens);
}

TEST(GpuEngine, TooLittleMemoryIsReportedBeforeLoading) {
  const int64_t for_cuda = gpu::open_gpu().emulated ? 0 : int64_t{300} << 20;
  setenv("TANDEM_GPU_MEMORY", std::to_string(for_cuda + 300'000'000).c_str(), 1);
  const std::string fits = error_of([] {
    ModelOptions options = tiny_r1(DeviceChoice::kCuda);
    options.context = 1000000;
    LoadedModel model(options);
  });
  setenv("TANDEM_GPU_MEMORY", "1000000", 1);
  const std::string never = error_of([] { LoadedModel model(tiny_r1(DeviceChoice::kCuda)); });
  setenv("TANDEM_GPU_MEMORY", "0", 1);
  const std::string none = error_of([] { LoadedModel model(tiny_r1(DeviceChoice::kCuda)); });
  std::string said;
  ModelOptions options = tiny_r1(DeviceChoice::kAuto);
  options.warn = [&](const std::string& line) { said += line; };
  EXPECT_EQ(LoadedModel(options).device(), "cpu");
  unsetenv("TANDEM_GPU_MEMORY");
  EXPECT_TRUE(says(fits, "KV cache"));
  EXPECT_TRUE(says(fits, "--ctx "));
  EXPECT_TRUE(says(never, "do not fit with any --ctx"));
  EXPECT_TRUE(says(none, "use --device cpu"));
  EXPECT_TRUE(says(said, "running on the CPU: "));
}

TEST(GpuEngine, OtherExpertFormatsAreRefused) {
  ModelOptions options = tiny_r1(DeviceChoice::kCuda);
  options.experts = weight_format("int4");
  EXPECT_TRUE(says(error_of([&] { LoadedModel model(options); }), "leave it out"));
}

}  // namespace
}  // namespace tandem::test
