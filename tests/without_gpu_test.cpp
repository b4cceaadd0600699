// A program that was built without CUDA refuses everything that needs a GPU in the same words.
#include <gtest/gtest.h>

#include "bench/gpu/gpu_benches.h"
#include "loader/gpu_model.h"
#include "tests/error_of.h"

namespace tandem {
namespace {

TEST(WithoutGpu, RefusesWhatNeedsOne) {
  const std::string why_not = why_no_gpu();
  if (why_not.find("without CUDA") == std::string::npos) GTEST_SKIP() << "built with CUDA";
  EXPECT_EQ(why_not,
            "this program was built without CUDA: install the CUDA toolkit (12.4 or newer) and "
            "build it again, or use --device cpu");
  ModelWeights stored;
  const ModelConfig config;
  const WeightStore store(TANDEM_SOURCE_DIR "/models/tiny-r1");
  const std::pair<const char*, std::function<void()>> all[] = {
      {"this_gpu", [] { this_gpu(); }},
      {"id_of_gpu", [] { id_of_gpu(); }},
      {"require_fp8_gpu", [] { require_fp8_gpu(); }},
      {"gpu_memory", [&] { gpu_memory(stored, config, {}); }},
      {"require_hand_off", [] { require_hand_off({}); }},
      {"load_gpu_model", [&] { load_gpu_model(store, stored, config, {}, {}); }},
      {"measured_gpu", [] { measured_gpu(1e-3); }},
      {"measured_gpu_bounds", [] { measured_gpu_bounds(1e-3); }},
      {"measured_kernel_gap", [] { measured_kernel_gap(1e-3); }},
      {"measured_hand_offs", [] { measured_hand_offs(1e-3); }}};
  for (const auto& [name, call] : all) EXPECT_EQ(error_of(call), why_not) << name;
}

TEST(WithoutGpu, HasNoTimersAndNoModels) {
  if (why_no_gpu().empty()) GTEST_SKIP() << "a GPU is here";
  EXPECT_FALSE(gpu_bench_models());
  EXPECT_FALSE(gpu_bench_models(true));
  EXPECT_FALSE(small_kernel_timer({}, 1, 1));
  std::string cublas;
  EXPECT_FALSE(product_timer({}, {DType::kBF16}, cublas));
}

// `bench hybrid` says why before it measures anything.
TEST(WithoutGpu, HybridNeedsAGpu) {
  const auto check = hybrid_benchmark().check;
  EXPECT_EQ(error_of([&] { check({.tokens = {513}}); }), "--tokens 513: must be between 1 and 512");
  const std::string why_not = why_no_gpu();
  EXPECT_EQ(error_of([&] { check({.tokens = {512}}); }),
            why_not.empty() ? "no error" : "bench hybrid needs a GPU: " + why_not);
}

}  // namespace
}  // namespace tandem
