// The loads of ranks from uses and places of experts, computed by hand, and where grids have their
// experts.
#include "scheduling/expert_loads.h"

#include <gtest/gtest.h>

#include "loader/expert_homes.h"
#include "tests/small_config.h"

namespace tandem::test {
namespace {

// Layer 0 is dense; both others have 4 experts.
const ExpertUses kUses = {
    .n_steps = 5, .n_tokens = 20, .of_layer = {{}, {8, 16, 0, 16}, {10, 10, 10, 10}}};

TEST(ExpertLoads, AreOfTheRanksOfEachLayer) {
  const ExpertHomes homes = {
      .n_ranks = 2,
      .ranks_of_layer = {{0, 2}, {0, 2}, {0, 2}},
      // Expert 1 of layer 1 is on both; expert 3 of layer 2 is on rank 1, the others are on rank 0.
      .ranks = {{}, {{0}, {0, 1}, {1}, {1}}, {{0}, {0}, {0}, {1}}}};
  const ExpertLoads loads = loads_of(kUses, homes);
  ASSERT_EQ(loads.layers.size(), 3u);
  EXPECT_EQ(loads.layers[0].n_rows, 0);
  EXPECT_EQ(loads.layers[0].balancedness, 1);
  EXPECT_EQ(loads.layers[1].n_rows, 40);
  EXPECT_DOUBLE_EQ(loads.layers[1].balancedness, 20 / 24.0) << "16 and 24 rows";
  EXPECT_DOUBLE_EQ(loads.layers[2].balancedness, 20 / 30.0) << "30 and 10 rows";
  EXPECT_DOUBLE_EQ(loads.balancedness, (20 / 24.0 + 20 / 30.0) / 2) << "as many rows in both";
  EXPECT_EQ(loads.of_rank, (std::vector<double>{46, 34}));
  EXPECT_EQ(loads.gpu_share, 0);
}

TEST(ExpertLoads, LayersWithMoreRowsWeighMore) {
  ExpertUses uses = kUses;
  uses.of_layer[1] = {0, 0, 0, 120};
  const ExpertHomes homes = {.n_ranks = 2,
                             .ranks_of_layer = {{0, 2}, {0, 2}, {0, 2}},
                             .ranks = {{}, {{0}, {1}, {0}, {1}}, {{0}, {1}, {0}, {1}}}};
  const ExpertLoads loads = loads_of(uses, homes);
  EXPECT_DOUBLE_EQ(loads.layers[1].balancedness, 0.5);
  EXPECT_DOUBLE_EQ(loads.layers[2].balancedness, 1);
  EXPECT_DOUBLE_EQ(loads.balancedness, (120 * 0.5 + 40 * 1) / 160);
}

TEST(ExpertLoads, ALayerWithoutRowsIsBalanced) {
  const ExpertHomes homes = {
      .n_ranks = 2, .ranks_of_layer = {{0, 2}, {0, 2}}, .ranks = {{}, {{0}, {0}, {0}, {0}}}};
  const ExpertLoads loads = loads_of({.of_layer = {{}, {0, 0, 0, 0}}}, homes);
  EXPECT_EQ(loads.layers[1].balancedness, 1);
  EXPECT_EQ(loads.balancedness, 1);
  EXPECT_EQ(loads.of_rank, (std::vector<double>{0, 0}));
}

// Layer 1 is on ranks 0 and 1, layer 2 on ranks 2 and 3.
TEST(ExpertLoads, StagesHaveTheirOwnLayers) {
  const ExpertHomes homes = {.n_ranks = 4,
                             .ranks_of_layer = {{0, 2}, {0, 2}, {2, 2}},
                             .ranks = {{}, {{0}, {1}, {0}, {1}}, {{2}, {3}, {2}, {2}}}};
  const ExpertLoads loads = loads_of(kUses, homes);
  EXPECT_EQ(loads.of_rank, (std::vector<double>{8, 32, 30, 10}));
  EXPECT_DOUBLE_EQ(loads.layers[1].balancedness, 20 / 32.0);
  EXPECT_DOUBLE_EQ(loads.layers[2].balancedness, 20 / 30.0);
}

TEST(ExpertLoads, OneRankIsBalancedAndSharesRowsWithItsGpu) {
  const ExpertHomes homes = {.n_ranks = 1,
                             .ranks_of_layer = {{0, 1}, {0, 1}, {0, 1}},
                             .ranks = {{}, {{0}, {0}, {0}, {0}}, {{0}, {0}, {0}, {0}}},
                             .on_gpu = {{}, {false, true, true, false}, {true, true, true, false}}};
  const ExpertLoads loads = loads_of(kUses, homes);
  EXPECT_EQ(loads.balancedness, 1);
  EXPECT_EQ(loads.of_rank, std::vector<double>{80});
  EXPECT_DOUBLE_EQ(loads.layers[1].gpu_share, 16 / 40.0);
  EXPECT_DOUBLE_EQ(loads.layers[2].gpu_share, 30 / 40.0);
  EXPECT_DOUBLE_EQ(loads.gpu_share, 46 / 80.0);
}

TEST(ExpertHomes, OfOneProcess) {
  const ModelConfig config = config_of_four_experts(4);
  ExecutedParts parts = {};
  ExpertHomes homes = expert_homes(config, parts);
  EXPECT_EQ(homes.n_ranks, 1);
  EXPECT_EQ(homes.ranks_of_layer, std::vector<Slice>(4, Slice{0, 1}));
  EXPECT_TRUE(homes.ranks[0].empty()) << "dense";
  EXPECT_EQ(homes.ranks[3], (std::vector<std::vector<int>>(4, {0})));
  EXPECT_TRUE(homes.on_gpu.empty());
  parts.gpu = evenly_on_gpu(config, 5);
  homes = expert_homes(config, parts);
  EXPECT_EQ(homes.on_gpu, parts.gpu->experts);
}

// Where there are other ranks than the process with the GPU, experts move between ranks.
TEST(ExpertHomes, ChangesAreOfRanksUnlessOnlyAGpuAndItsCpuHaveExperts) {
  ExpertHomes homes = {.n_ranks = 3,
                       .ranks_of_layer = {{0, 3}},
                       .ranks = {{{0}, {1}, {2}}},
                       .on_gpu = {{true, false, false}}};
  EXPECT_FALSE(homes.exchanges_with_gpu());
  const std::vector<ExpertChange> exchange = {{0, 1, {2}}, {0, 2, {1}}};
  homes.apply(exchange);
  EXPECT_EQ(homes.ranks[0], (std::vector<std::vector<int>>{{0}, {2}, {1}}));
  EXPECT_EQ(homes.on_gpu[0], (std::vector<bool>{true, false, false}));
  homes.n_ranks = 1;
  EXPECT_TRUE(homes.exchanges_with_gpu());
  homes.on_gpu.clear();
  EXPECT_FALSE(homes.exchanges_with_gpu());
}

TEST(ExpertHomes, OfRanksAndStages) {
  const ModelConfig config = config_of_four_experts(4);
  ExecutedParts parts = {};
  parts.grid = {.n_replicas = 2, .tp = 1, .n_stages = 2};
  parts.stages = {{0, 2}, {2, 2}};
  const ExpertHomes dealt = expert_homes(config, parts);
  EXPECT_EQ(dealt.n_ranks, 4);
  EXPECT_EQ(dealt.ranks_of_layer, (std::vector<Slice>{{0, 2}, {0, 2}, {2, 2}, {2, 2}}));
  EXPECT_EQ(dealt.ranks[1], (std::vector<std::vector<int>>{{0}, {1}, {0}, {1}}));
  EXPECT_EQ(dealt.ranks[3], (std::vector<std::vector<int>>{{2}, {3}, {2}, {3}}));
  parts.ranks_of_expert = {{}, {{1}, {0, 1}, {0}, {0}}, {{0}, {0}, {0}, {1}}, {{1}, {0}, {1}, {0}}};
  const ExpertHomes placed = expert_homes(config, parts);
  EXPECT_EQ(placed.ranks[1], (std::vector<std::vector<int>>{{1}, {0, 1}, {0}, {0}}));
  EXPECT_EQ(placed.ranks[2], (std::vector<std::vector<int>>{{2}, {2}, {2}, {3}}));
}

TEST(ExpertHomes, SlicedExpertsAreOnEveryRankOfTheirStage) {
  const ModelConfig config = config_of_four_experts(4);
  ExecutedParts parts = {};
  parts.grid = {.n_replicas = 1, .tp = 2, .n_stages = 2};
  parts.stages = {{0, 3}, {3, 1}};
  parts.gpu = GpuParts{};
  parts.gpu->expert_columns = Slice{0, 64};
  const ExpertHomes homes = expert_homes(config, parts);
  EXPECT_EQ(homes.ranks[2], (std::vector<std::vector<int>>(4, {0, 1})));
  EXPECT_EQ(homes.ranks[3], (std::vector<std::vector<int>>(4, {2, 3})));
  EXPECT_TRUE(homes.on_gpu.empty()) << "of this rank alone";
}

}  // namespace
}  // namespace tandem::test
