// Counts of the router's choices, and that the planner reads them.
#include "offload/routing_recorder.h"

#include <gtest/gtest.h>

#include "tests/error_of.h"
#include "tests/small_config.h"

namespace tandem {
namespace {

struct CallsOfPool final : ExpertPool {
  void add_to(Ticket, TensorView) override {}
  Ticket start(const ExpertBatch& batch) override {
    layers.push_back(batch.layer);
    return 0;
  }
  std::vector<int> layers;
};

// Rows of ids have a stride of three, as a part of a larger matrix.
void submit(ExpertPool& experts, int layer, std::vector<int32_t> ids) {
  const auto n = static_cast<int64_t>(ids.size() / 3);
  experts.submit({layer, {}, {{ids.data(), n, 2, 3, DType::kI32}, {}}});
}

TEST(RoutingRecorder, CountsEveryChoiceWhileItObserves) {
  const ModelConfig config = config_of_four_experts(3);
  CallsOfPool calls;
  RoutingRecorder recorder(config);
  submit(calls, 2, {0, 0, -1});  // not yet observed
  calls.observe(&recorder);
  submit(calls, 1, {0, 1, -1, 0, 2, -1});
  submit(calls, 2, {3, 1, -1, 1, 3, -1});
  submit(calls, 1, {0, 3, -1});
  submit(calls, 2, {1, 3, -1});
  calls.observe(nullptr);
  submit(calls, 1, {2, 2, -1});
  EXPECT_EQ(calls.layers, (std::vector<int>{2, 1, 2, 1, 2, 1}));
  const std::vector<std::vector<int64_t>> expected = {{}, {3, 1, 1, 1}, {0, 3, 0, 3}};
  EXPECT_EQ(recorder.counts().of_layer, expected);

  const std::string text = routing_statistics_json(config, recorder.counts());
  EXPECT_EQ(text, R"({"model":"DeepseekV3ForCausalLM, 3 layers of 7168, 2 of 4 experts of 2048, )"
                  R"(vocabulary of 129280","layers":3,"experts":4,"tokens":3,)"
                  // Layer 1: {0,1} {0,2} {0,3}; layer 2: {3,1} {1,3} {1,3}. Windows of two tokens
                  // have 3, 3, 2 and 2 different experts, those of three 4 and 2.
                  R"("experts_of_neighbours":[2.0,2.5,3.0],)"
                  "\"counts\":[[3,1,1,1],[0,3,0,3]]}\n");
  const RoutingStatistics read(config, text, "s.json");
  EXPECT_DOUBLE_EQ(read.share(1, 0), 1);
  EXPECT_DOUBLE_EQ(read.share(1, 3), 1.0 / 3);
  EXPECT_DOUBLE_EQ(read.share(2, 1), 1);
  EXPECT_TRUE(read.knows_neighbours());
  ModelConfig other = config;
  other.router.n_experts = 8;
  EXPECT_TRUE(says(error_of([&] { RoutingStatistics(other, text, "s.json"); }), "another model"));
}

TEST(RoutingRecorder, WindowsHaveAtMostNineTokens) {
  const ModelConfig config = config_of_four_experts(3);
  CallsOfPool calls;
  RoutingRecorder recorder(config);
  calls.observe(&recorder);
  for (int i = 0; i < 20; ++i) submit(calls, 1, {i < 10 ? 0 : 2, i < 10 ? 1 : 3, -1});
  const auto& windows = recorder.counts().neighbours;
  ASSERT_EQ(windows.size(), 9u);
  EXPECT_EQ(windows[0].n, 20);
  EXPECT_EQ(windows[8].n, 12);
  EXPECT_EQ(windows[0].experts, 20 * 2);
  EXPECT_EQ(windows[8].experts, 12 * 2 + 8 * 2) << "eight windows hold tokens of both kinds";
}

}  // namespace
}  // namespace tandem
