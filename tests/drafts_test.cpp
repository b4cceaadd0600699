// What the planner predicts of steps with drafts, compared with figures worked out by hand.
#include "offload/plan/drafts.h"

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "model/cost.h"
#include "offload/plan/layer_time.h"
#include "tests/planner_cases.h"

namespace tandem {
namespace {

// R1 in FP8 on the CPU of round_machine(): 100 GB/s and 1 Top/s.
class DraftsOfR1 : public testing::Test {
 protected:
  DraftsOfR1() {
    machine_.gpus.clear();
    // Every product takes the time of reading and arithmetic.
    for (const char* work : {"experts", "dense"})
      for (const char* format : {"fp8", "bf16"})
        machine_.curves.push_back({work, format, {{1, 1.0}}});
    placement_.stages = {{0, 60, {{0, -1}}, 1}};
  }
  DraftPlan planned() const {
    const PlanInput in = {r1_, machine_, workload_, routing_};
    return plan_drafts(in, placement_, memory_by_device(r1_, machine_, placement_));
  }
  std::string why() const {
    return why_in_words({r1_, machine_, workload_, routing_}, placement_, planned());
  }

  ModelConfig r1_ = known_model("r1");
  Machine machine_ = round_machine();
  Placement placement_ = r1_with_experts_on_the_cpu();
  Workload workload_;
  RoutingStatistics routing_{r1_};
};

TEST(Drafts, ExpectedTokensAreTheSumOfPowers) {
  EXPECT_DOUBLE_EQ(expected_tokens(0, 0.85), 1);
  EXPECT_DOUBLE_EQ(expected_tokens(1, 0.85), 1.85);
  EXPECT_DOUBLE_EQ(expected_tokens(3, 0.5), 1.875);
  EXPECT_DOUBLE_EQ(expected_tokens(4, 1), 5);
  EXPECT_DOUBLE_EQ(expected_tokens(4, 0), 1);
}

TEST_F(DraftsOfR1, AMoeLayerOfTwoTokensByHand) {
  const PlanInput in = {r1_, machine_, workload_, routing_};
  const auto layer = [&](const StepShape& shape) {
    return LayerModel(in, placement_, shape).layer(placement_.stages[0], 3, &placement_.layers[0]);
  };
  const LayerTime one = layer({1, 4096, false, 1}), drafted = layer({2, 4096, false, 1, 1});
  // Two tokens choose 256 (1 - (31/32)^2) = 15.75 experts, of 44 MB, with 16 rows.
  const double expert_ops = 6.0 * 7168 * 2048;
  EXPECT_NEAR(one[Part::kCpuExperts], 8 * (44'050'944 / 100e9 + expert_ops / 1e12), 1e-12);
  EXPECT_NEAR(drafted[Part::kCpuExperts], 15.75 * 44'050'944 / 100e9 + 16 * expert_ops / 1e12,
              1e-12);
  // The matrices are read once: only the arithmetic doubles.
  const double shared = 3.0 * 7168 * 2048, router = 256.0 * 7168;
  EXPECT_NEAR(drafted[Part::kShared] - one[Part::kShared], 2 * shared / 1e12, 1e-12);
  EXPECT_NEAR(drafted[Part::kRouter] - one[Part::kRouter], 2 * router / 1e12, 1e-12);
  // A sequence's cache is read once, two sequences' caches twice.
  const LayerTime two = layer({2, 4096, false, 1});
  const double ratio = attention_ratio("avx512", true, 4096, machine_.curves);
  const AttentionWork alone = attention_work(r1_, 1, 4096), both = attention_work(r1_, 2, 4096);
  EXPECT_EQ(both.bytes, alone.bytes);
  EXPECT_TRUE(both.absorbed);
  EXPECT_NEAR(one[Part::kAttention], (alone.bytes / 100e9 + alone.ops / 1e12) / ratio, 1e-12);
  EXPECT_NEAR(drafted[Part::kAttention], (alone.bytes / 100e9 + both.ops / 1e12) / ratio, 1e-12);
  EXPECT_NEAR(two[Part::kAttention], 2 * one[Part::kAttention], 1e-12);
}

TEST_F(DraftsOfR1, AStepAndItsDraftsByHand) {
  workload_.draft_tokens = 2;
  workload_.acceptance = 0.5;
  const DraftPlan plan = planned();
  ASSERT_EQ(plan.steps.size(), 2u);
  EXPECT_TRUE(plan.with_mtp);
  const DraftedStep &without = plan.steps[0], &two = plan.steps[1];
  const PlanInput in = {r1_, machine_, workload_, routing_};
  const double context = 1024 + 1024 / 2.0;
  const Phase plain = predict_step(in, placement_, {1, context, false, 1});
  EXPECT_DOUBLE_EQ(without.step_seconds, plain.step_seconds);
  EXPECT_DOUBLE_EQ(without.tokens_per_second, 1 / plain.step_seconds);
  EXPECT_DOUBLE_EQ(without.draft_seconds, 0);
  // Each of two passes reads eh_proj [7168, 14336] in BF16, runs a MoE layer and the head
  // [129280, 7168] in BF16.
  const double eh_proj = 7168.0 * 14336, head = 129280.0 * 7168;
  const double pass = (eh_proj + head) * 2 * (1 / 100e9 + 1 / 1e12) + plain.moe.seconds;
  EXPECT_NEAR(two.draft_seconds, 2 * pass, 1e-9);
  const Phase three = predict_step(in, placement_, {3, context, false, 1, 2});
  EXPECT_DOUBLE_EQ(two.step_seconds, three.step_seconds + two.draft_seconds);
  EXPECT_DOUBLE_EQ(two.tokens, 1.75);
  EXPECT_DOUBLE_EQ(two.tokens_per_second, 1.75 / two.step_seconds);
  EXPECT_DOUBLE_EQ(two.experts, 256 * (1 - std::pow(31 / 32.0, 3)));
  EXPECT_DOUBLE_EQ(without.experts, 8);
  EXPECT_DOUBLE_EQ(plan.times(two), two.tokens_per_second / without.tokens_per_second);
}

TEST_F(DraftsOfR1, TheBestOfUpToFourIsRecommended) {
  int last = 0;
  for (const double acceptance : {0.0, 0.5, 0.7, 0.85, 0.95, 1.0}) {
    workload_.acceptance = acceptance;
    const DraftPlan plan = planned();
    ASSERT_EQ(plan.steps.size(), 5u);
    for (const DraftedStep& step : plan.steps)
      EXPECT_LE(step.tokens_per_second, plan.best().tokens_per_second);
    EXPECT_GE(plan.n_best, last) << "drafts that are accepted more often never pay less";
    last = plan.n_best;
    if (acceptance == 0) {
      EXPECT_EQ(plan.n_best, 0);
    }
  }
  EXPECT_GT(last, 0);
}

// A pipeline's last stage lacks the embedding that the layer needs (`--draft mtp` is refused).
TEST_F(DraftsOfR1, APipelineDraftsByPromptLookup) {
  EXPECT_FALSE(says(why(), "pipeline")) << why();
  placement_.stages = {{0, 30, {{0, -1}}, 1}, {31, 60, {{0, -1}}, 1}};
  const DraftPlan plan = planned();
  EXPECT_FALSE(plan.with_mtp);
  for (const DraftedStep& step : plan.steps) EXPECT_EQ(step.draft_seconds, 0);
  EXPECT_TRUE(says(why(), "from prompt lookup")) << why();
  EXPECT_TRUE(says(why(), "the stages of a pipeline do not compute the MTP layer")) << why();
}

TEST_F(DraftsOfR1, WithoutTheLayerPromptLookupDraftsInNoTime) {
  const DraftPlan mtp = planned();
  // A layer in FP8 with 256 experts of 44 MB and its shared expert, and eh_proj.
  EXPECT_NEAR(static_cast<double>(mtp.mtp_bytes), 257 * 44.05e6 + 2.0 * 7168 * 14336 + 187e6, 20e6);
  // 2 % of the memory is reserved.
  const int64_t left = memory_by_device(r1_, machine_, placement_)[0].free_bytes() - mtp.mtp_bytes;
  machine_.nodes[0].memory_bytes -= static_cast<int64_t>(static_cast<double>(left - 1'000) / 0.98);
  EXPECT_TRUE(planned().with_mtp);
  machine_.nodes[0].memory_bytes -= 3'000;
  const DraftPlan full = planned();
  EXPECT_FALSE(full.with_mtp);
  EXPECT_TRUE(says(why(), "there is no room for the MTP layer, 11.7 GB")) << why();
  r1_.n_mtp_layers = 0;
  const DraftPlan lookup = planned();
  EXPECT_FALSE(lookup.with_mtp);
  EXPECT_EQ(lookup.mtp_bytes, 0);
  for (size_t i = 0; i < lookup.steps.size(); ++i) {
    EXPECT_EQ(lookup.steps[i].draft_seconds, 0);
    EXPECT_DOUBLE_EQ(lookup.steps[i].step_seconds, full.steps[i].step_seconds);
    EXPECT_DOUBLE_EQ(lookup.steps[i].step_seconds,
                     mtp.steps[i].step_seconds - mtp.steps[i].draft_seconds);
  }
}

TEST_F(DraftsOfR1, WhatIsSaid) {
  const auto words = [&] { return drafts_in_words(planned()); };
  workload_.draft_tokens = 0;
  EXPECT_EQ(words(), "off");
  EXPECT_EQ(why(), "no drafts, as asked");
  workload_.draft_tokens = 1;
  workload_.acceptance = 0.1;
  EXPECT_TRUE(words().starts_with("off: k = 1 at acceptance 0.1 costs, 0.")) << words();
  EXPECT_TRUE(says(why(), "k = 1 would bring 1.10 tokens")) << why();
  workload_.acceptance = 1;
  EXPECT_TRUE(words().starts_with("k = 1 at acceptance 1: 1.")) << words();
  EXPECT_TRUE(says(why(), "15.8 different experts instead of 8.0, if tokens choose independently"));
  EXPECT_FALSE(says(why(), "GPU"));
}

TEST_F(DraftsOfR1, TheNumberOfDraftsIsChecked) {
  const auto refusal = [&] { return error_of([&] { require_sound(workload_, r1_); }); };
  workload_.draft_tokens = 8;
  EXPECT_EQ(refusal(), "no error");
  workload_.draft_tokens = 9;
  EXPECT_EQ(refusal(), "--draft-tokens 9: must be between 0 and 8");
  workload_.draft_tokens = -1;
  EXPECT_EQ(refusal(), "--draft-tokens -1: must be between 0 and 8");
  workload_.draft_tokens = {};
  workload_.acceptance = 1.5;
  EXPECT_EQ(refusal(), "--acceptance 1.5: must be between 0 and 1");
}

// 4 experts of which a token uses 1, all equally often.
class Neighbours : public testing::Test {
 protected:
  Neighbours() {
    config_.n_layers = 1;
    config_.n_dense_layers = 0;
    config_.router.n_experts = 4;
    config_.router.n_active = 1;
  }
  RoutingStatistics read(const std::string& means) const {
    return {config_,
            R"({"layers": 1, "experts": 4, "tokens": 100, "experts_of_neighbours": )" + means +
                R"(, "counts": [[25, 25, 25, 25]]})",
            "s.json"};
  }
  ModelConfig config_;
};

TEST_F(Neighbours, CountAsFewerIndependentTokens) {
  // 4 (1 - (3/4)^t) = 1.5 has the solution t = ln(0.625) / ln(0.75).
  const RoutingStatistics measured = read("[1, 1.5]");
  EXPECT_TRUE(measured.knows_neighbours());
  const double two = std::log(0.625) / std::log(0.75);
  EXPECT_NEAR(measured.independent_tokens(1), 1, 1e-9);
  EXPECT_NEAR(measured.independent_tokens(2), two, 1e-9);
  EXPECT_NEAR(measured.independent_tokens(6), 3 * two, 1e-9) << "beyond what was measured";
  EXPECT_NEAR(read("[1, 1.75]").independent_tokens(2), 2, 1e-9) << "4 (1 - (3/4)^2)";
  EXPECT_DOUBLE_EQ(read("[1, 1.9]").independent_tokens(2), 2) << "never more than they are";
  EXPECT_FALSE(read("[]").knows_neighbours());
  EXPECT_DOUBLE_EQ(read("[]").independent_tokens(3), 3);
}

TEST_F(Neighbours, MeansAreChecked) {
  const auto refusal = [&](const char* means) { return error_of([&] { read(means); }); };
  EXPECT_TRUE(says(refusal("[0.5]"), "experts_of_neighbours[0] is 0.5")) << refusal("[0.5]");
  EXPECT_TRUE(says(refusal("[1, 2.5]"), "experts_of_neighbours[1] is 2.5"));
  EXPECT_TRUE(says(refusal("[1, 1.5, 1.25]"), "experts_of_neighbours[2] is 1.25"));
  EXPECT_TRUE(says(refusal("[1, \"x\"]"), "experts_of_neighbours[1] is \"x\""));
}

// The same experts for neighbouring tokens: a drafted step reads what a step without drafts reads.
TEST_F(DraftsOfR1, NeighboursThatShareExpertsMakeDraftsCheap) {
  nlohmann::json text = {{"layers", 61}, {"experts", 256}, {"tokens", 256}};
  text["counts"] = std::vector<std::vector<int>>(58, std::vector<int>(256, 8));
  text["experts_of_neighbours"] = {8, 8};
  routing_ = RoutingStatistics(r1_, text.dump(), "s.json");
  workload_.draft_tokens = 1;
  const DraftPlan plan = planned();
  EXPECT_NEAR(plan.steps[1].experts, 8, 1e-6);
  EXPECT_TRUE(says(why(), "8.0 different experts instead of 8.0, as measured"));
  const PlanInput in = {r1_, machine_, workload_, routing_};
  const LayerTime t = LayerModel(in, placement_, {2, 4096, false, 1, 1})
                          .layer(placement_.stages[0], 3, &placement_.layers[0]);
  EXPECT_NEAR(t[Part::kCpuExperts], 8 * 44'050'944 / 100e9 + 16 * 6.0 * 7168 * 2048 / 1e12, 1e-9);
}

}  // namespace
}  // namespace tandem
