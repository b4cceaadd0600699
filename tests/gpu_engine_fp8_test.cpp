// Whole models with activations in FP8 on a GPU, real or emulated: their errors are those of a
// naive model with the same rounding, and the rounding is applied only on request.
#include <gtest/gtest.h>

#include "gpu_kernels/runtime.h"
#include "loader/weights/load_weights.h"
#include "model/checkpoint.h"
#include "tests/check_close.h"
#include "tests/golden_file.h"
#include "tests/naive_deepseek.h"
#include "tests/plain_engine.h"
#include "tests/whole_models.h"

namespace tandem::test {
namespace {

constexpr int kTokens = 17;  // one more than the largest step without rounding

std::vector<int32_t> some_tokens(int n) {
  std::vector<int32_t> tokens(n);
  for (int i = 0; i < n; ++i) tokens[i] = 3 + i * 37 % 200;
  return tokens;
}

// Logits of every position.
std::vector<std::vector<float>> logits_on_gpu(ModelOptions options, bool fp8_activations,
                                              const std::vector<int32_t>& tokens) {
  options.device = DeviceChoice::kCuda;
  options.n_threads = 1;
  options.context = 64;
  options.max_logits = 40;
  options.fp8_activations = fp8_activations;
  LoadedModel loaded(options);
  std::vector<std::vector<float>> rows;
  score(loaded.model(), loaded.cache(), tokens, 0,
        [&](int64_t, std::span<const float> row) { rows.emplace_back(row.begin(), row.end()); });
  return rows;
}

// A difference of 10^-3 between two codes becomes one of 10^-1, so after some layers two models
// that round differ from each other as much as from an exact one. gpu_hybrid_fp8_test bounds the
// parts of a layer.
//
// Returns the largest difference of the median position, relative to its largest logit. The worst
// position is not used, because a near tie of two experts may change the choice.
template <class A, class B>
double off(const std::vector<A>& got, const std::vector<B>& want) {
  std::vector<double> each;
  for (size_t t = 0; t < want.size(); ++t) {
    double most = 0;
    for (size_t i = 0; i < want[t].size(); ++i)
      most = std::max(most, std::abs(double(got[t][i]) - want[t][i]));
    each.push_back(most / largest(want[t]));
  }
  std::nth_element(each.begin(), each.begin() + each.size() / 2, each.end());
  return each[each.size() / 2];
}

void expect_rounded(const std::string& directory, const std::vector<int32_t>& tokens) {
  SCOPED_TRACE(directory);
  const WeightStore store(directory);
  const ModelConfig config = ModelConfig::from_directory(directory);
  const ModelWeights weights = stored_weights(store, config);
  const auto exact = naive_logits(config, weights, tokens);
  const auto rounded = naive_logits(config, weights, tokens, true);
  const auto bf16 = logits_on_gpu({.directory = directory}, false, tokens);
  const auto fp8 = logits_on_gpu({.directory = directory}, true, tokens);
  std::printf("%s: off by %.4f with FP8, %.4f by rounding so alone, %.4f with BF16\n",
              directory.c_str(), off(fp8, exact), off(rounded, exact), off(bf16, exact));
  EXPECT_LT(off(fp8, exact), 1.5 * off(rounded, exact));
  EXPECT_GT(off(fp8, exact), 3 * off(bf16, exact));
}

TEST(GpuEngineFp8, ErrorsAreThoseOfRounding) {
  if (!gpu::open_gpu().fp8_mma) GTEST_SKIP() << "no FP8 mma";
  for (const char* family : {"kimi_k2", "v3_1_fp8", "v3_fp8"})
    expect_rounded(kGolden + family,
                   GoldenFile(kGolden + family + "/golden.safetensors").ints("tokens_17"));
  expect_rounded(kRoot + "/models/tiny-r1", some_tokens(kTokens));
}

TEST(GpuEngineFp8, SmallStepsAreUnchanged) {
  if (!gpu::open_gpu().fp8_mma) GTEST_SKIP() << "no FP8 mma";
  const ModelOptions tiny = tiny_r1(DeviceChoice::kCuda);
  const auto few = some_tokens(kTokens - 1), more = some_tokens(kTokens);
  EXPECT_EQ(logits_on_gpu(tiny, true, few), logits_on_gpu(tiny, false, few));
  EXPECT_NE(logits_on_gpu(tiny, true, more), logits_on_gpu(tiny, false, more));
}

TEST(GpuEngineFp8, TinyR1AnswersAsWithout) {
  if (!gpu::open_gpu().fp8_mma) GTEST_SKIP() << "no FP8 mma";
  ModelOptions options = tiny_r1(DeviceChoice::kCuda);
  const auto want = answers(options, 3);
  options.fp8_activations = true;
  EXPECT_EQ(answers(options, 3), want);
}

}  // namespace
}  // namespace tandem::test
