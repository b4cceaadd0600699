// Where a small model's experts go when memory is short, and what contradicts a placement.
#include "loader/decision.h"

#include <gtest/gtest.h>

#include "loader/pack_weights.h"
#include "model/checkpoint.h"
#include "tests/error_of.h"
#include "tests/whole_models.h"

namespace tandem::test {
namespace {

class OnTheCpu : public ::testing::Test {
 protected:
  const std::string directory_ = kGolden + "v2_lite";  // experts in BF16
  const ModelConfig config_ = ModelConfig::from_directory(directory_);
  const WeightStore store_{directory_};
  ModelWeights stored_ = stored_weights(store_, config_);
  const Topology topology_ = with_threads(this_topology(), 1);
  const cpu::KernelTable kernels_ = cpu::kernels_for(cpu::best_isa());
  const CpuWeights home_{kernels_, topology_};
  std::vector<std::string> warnings_;
  ModelOptions options_ = {.directory = directory_, .context = 64};

  Decision decide_with(int64_t memory_bytes) {
    warnings_.clear();
    options_.warn = [this](const std::string& line) { warnings_.push_back(line); };
    return decide(options_, {config_, stored_, topology_, kernels_, home_, memory_bytes});
  }
  int64_t bytes(std::optional<WeightFormat> format) {
    return packed_bytes(stored_, config_, home_, ExpertsLayout(format)) +
           KvCache::bytes_for(config_, options_.context, cache_type_for(kernels_));
  }
};

TEST_F(OnTheCpu, ExpertsAreNarrowedWithAWarning) {
  const int64_t stored = bytes({}), int8 = bytes(weight_format("int8"));
  ASSERT_LT(int8, stored);
  ASSERT_LT(int8, bytes(weight_format("int4"))) << "rows are shorter than a group";
  EXPECT_EQ(decide_with(stored).parts.experts.format(1), std::nullopt);
  EXPECT_TRUE(warnings_.empty());
  EXPECT_EQ(decide_with(stored - 1).parts.experts.format(1), weight_format("int8"));
  ASSERT_EQ(warnings_.size(), 1u);
  EXPECT_TRUE(says(warnings_[0], "they are kept as int8"));
  EXPECT_TRUE(says(error_of([&] { decide_with(int8 - 1); }), "use a smaller model"));
  options_.experts = weight_format("int8");
  EXPECT_EQ(decide_with(stored).parts.experts.format(1), weight_format("int8"));
  EXPECT_TRUE(warnings_.empty()) << "as requested";
}

TEST_F(OnTheCpu, StepsAreBoundedByTheirContext) {
  EXPECT_EQ(decide_with(bytes({})).limits.max_tokens, 64);
  options_.max_kv_tokens = 256;
  EXPECT_EQ(decide_with(bytes({})).limits.max_tokens, 256);
  options_.step_tokens = 100;
  options_.max_logits = 1000;
  const StepLimits limits = decide_with(bytes({})).limits;
  EXPECT_EQ(limits.max_tokens, 100);
  EXPECT_EQ(limits.max_logits, 100);
}

TEST_F(OnTheCpu, ContextsHaveBounds) {
  options_.context = 0;
  EXPECT_EQ(decide_with(int64_t{1} << 40).context,
            std::min<int64_t>(config_.max_context, kDefaultContext));
  options_.context = (int64_t{1} << 30) + 1;
  EXPECT_TRUE(says(error_of([&] { decide_with(0); }), "--ctx 1073741825: must be between"));
}

}  // namespace
}  // namespace tandem::test
