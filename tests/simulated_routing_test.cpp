// Experts that replace the router's choice in measurements: exact sequences, equal counts, the
// group limit, and the proportions of statistics.
#include "offload/simulation/simulated_routing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "gpu_kernels/simulated_row.h"
#include "model/simulated_choices.h"
#include "offload/plan/workload.h"
#include "tests/error_of.h"
#include "tests/temp_directory.h"

namespace tandem {
namespace {

ModelConfig r1_like(int n_layers = 5) {
  ModelConfig config;
  config.n_layers = n_layers;
  config.n_dense_layers = 1;
  return config;
}

std::shared_ptr<const SimulatedChoices> choices_of(const std::string& text,
                                                   const ModelConfig& config,
                                                   const SharingRanks& ranks = {}) {
  return simulated_choices(simulated_routing(text), config, config, ranks);
}

// The experts of the first n tokens of a step, all at position 0.
std::vector<int32_t> first_choices(const SimulatedChoices& choices, int layer, int n_tokens) {
  std::vector<int32_t> ids;
  const auto table = choices.of_layer(layer);
  for (int t = 0; t < n_tokens; ++t) {
    const int64_t row = simulated_row(t, 0, choices.layers[layer].n_rows, choices.varies);
    for (int k = 0; k < choices.n_active; ++k) ids.push_back(table[row * choices.n_active + k]);
  }
  return ids;
}

std::map<int32_t, int> counts_of(const std::vector<int32_t>& ids) {
  std::map<int32_t, int> counts;
  for (const int32_t id : ids) ++counts[id];
  return counts;
}

void expect_different_in_each_row(const SimulatedChoices& choices) {
  for (size_t i = 0; i < choices.ids.size(); i += choices.n_active) {
    const std::set<int32_t> row(choices.ids.begin() + i,
                                choices.ids.begin() + i + choices.n_active);
    ASSERT_EQ(static_cast<int>(row.size()), choices.n_active) << i;
  }
}

// Place i of all choices is expert (i % ranks) * n_experts / ranks, as in lmdeploy's simulation.
TEST(SimulatedRouting, GoesAroundStatedRanks) {
  const ModelConfig config = r1_like();
  for (const int ranks : {8, 10, 32, 255, 256}) {
    const auto choices = choices_of("balanced-ranks:" + std::to_string(ranks), config);
    EXPECT_EQ(choices->name, "balanced-ranks:" + std::to_string(ranks));
    EXPECT_EQ(choices->layers[0].n_rows, 0) << "a dense layer";
    for (const int layer : {1, 4}) {
      const std::vector<int32_t> ids = first_choices(*choices, layer, 600);
      for (size_t i = 0; i < ids.size(); ++i)
        ASSERT_EQ(ids[i], static_cast<int>(i) % ranks * 256 / ranks) << ranks << ", place " << i;
    }
    EXPECT_EQ(choices->expected_experts(3), std::min(ranks, 24));
    EXPECT_EQ(choices->expected_experts(300), ranks);
  }
  // A token needs several experts of each of three ranks: with 85, 85 and 86.
  EXPECT_EQ(first_choices(*choices_of("balanced-ranks:3", config), 2, 2),
            (std::vector<int32_t>{0, 85, 170, 1, 86, 171, 2, 87, 170, 0, 85, 171, 1, 86, 172, 2}));
}

// Experts that are dealt round-robin: rank r has r, r + 4, ..; without expert 0, and with one that
// all have.
TEST(SimulatedRouting, GoesAroundTheRanksThatRun) {
  ModelConfig config = r1_like();
  config.router.n_experts = 16;
  config.router.n_active = 3;
  config.router.n_groups = config.router.n_active_groups = 1;
  const std::vector<std::vector<int32_t>> one = {{0}, {1}, {2}, {3}}, all = {{0, 1, 2, 3}};
  const auto choices = choices_of(
      "balanced-ranks", config, {4, [&](int layer, int expert) {
                                   return layer == 3    ? std::span<const int32_t>()
                                          : expert == 0 ? std::span<const int32_t>(all[0])
                                                        : std::span<const int32_t>(one[expert % 4]);
                                 }});
  // The first expert of rank 0 is 4, because all ranks have expert 0.
  EXPECT_EQ(first_choices(*choices, 2, 4),
            (std::vector<int32_t>{4, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3}));
  EXPECT_EQ(choices->layers[3].n_rows, 0) << "no rank of this stage has the layer";
  const auto two =
      choices_of("balanced-ranks", config,
                 {2, [&](int, int expert) { return std::span<const int32_t>(one[expert % 2]); }});
  EXPECT_EQ(first_choices(*two, 1, 2), (std::vector<int32_t>{0, 1, 2, 1, 0, 3}));
}

TEST(SimulatedRouting, GivesAllExpertsAsManyRows) {
  for (const auto& [n_experts, n_active] : {std::pair{256, 8}, {160, 6}, {64, 6}, {16, 4}}) {
    ModelConfig config = r1_like();
    config.router.n_experts = n_experts;
    config.router.n_active = n_active;
    const auto choices = choices_of("balanced-experts", config);
    expect_different_in_each_row(*choices);
    for (const int n_tokens : {1, 7, 33, 500}) {
      const auto counts = counts_of(first_choices(*choices, 2, n_tokens));
      const int least = n_tokens * n_active / n_experts;
      if (least > 0) {
        EXPECT_EQ(static_cast<int>(counts.size()), n_experts);
      }
      for (const auto& [expert, count] : counts) {
        ASSERT_LE(count, least + 1);
        ASSERT_GE(count, std::max(1, least));
      }
    }
  }
}

TEST(SimulatedRouting, DrawsWithinTheGroupLimit) {
  const ModelConfig config = r1_like();
  const auto choices = choices_of("grouped-random", config);
  EXPECT_EQ(choices->ids, choices_of("grouped-random", config)->ids) << "on every rank";
  expect_different_in_each_row(*choices);
  const auto layer_1 = choices->of_layer(1), layer_2 = choices->of_layer(2);
  EXPECT_FALSE(std::equal(layer_1.begin(), layer_1.end(), layer_2.begin()));
  std::set<size_t> n_groups;
  for (size_t i = 0; i < layer_1.size(); i += 8) {
    std::set<int32_t> groups;
    for (size_t k = i; k < i + 8; ++k) groups.insert(layer_1[k] / 32);
    n_groups.insert(groups.size());
  }
  EXPECT_LE(*n_groups.rbegin(), 4u);
  EXPECT_GE(*n_groups.rbegin(), 4u) << "the limit is reached";
  // The mean of 2048 rows is 64 an expert; the chance of one outside of these bounds is below 1e-6.
  for (const double share : choices->shares(1)) EXPECT_NEAR(share * 2048, 64, 50);

  ModelConfig greedy = config;
  greedy.router.method = TopkMethod::kGreedy;
  const auto unlimited = choices_of("grouped-random", greedy);
  std::set<int32_t> groups;
  for (int k = 0; k < 8; ++k) groups.insert(unlimited->of_layer(1)[k] / 32);
  EXPECT_GT(groups.size(), 4u) << "the same in every run";
}

// Steps at other positions, and other tokens of a step, take other rows.
TEST(SimulatedRouting, VariesWithTokenAndPosition) {
  std::map<int64_t, int> rows;
  for (int token = 0; token < 64; ++token)
    for (int position = 0; position < 64; ++position)
      ++rows[simulated_row(token, position, 2048, true)];
  EXPECT_GT(rows.size(), 1600u);  // 1771 of 2048 are expected
  EXPECT_EQ(simulated_row(5, 77, 3, false), 2);
}

std::string with_counts(const std::string& file, const std::vector<std::vector<int>>& counts,
                        int n_layers, int tokens) {
  std::ofstream(file) << nlohmann::json{
      {"layers", n_layers}, {"experts", counts[0].size()}, {"tokens", tokens}, {"counts", counts}};
  return file;
}

TEST(SimulatedRouting, HasTheProportionsOfStatistics) {
  ModelConfig config = r1_like(3);
  config.router.n_experts = 8;
  config.router.n_active = 3;
  const TempDirectory folder;
  // In layer 1 every token has expert 7 and none has expert 0.
  const std::vector<std::vector<int>> counts = {{0, 700, 300, 400, 250, 250, 100, 1000},
                                                {375, 375, 375, 375, 375, 375, 375, 375}};
  const std::string file = with_counts(folder.file("s.json"), counts, 3, 1000);
  const auto choices = choices_of(file, config);
  EXPECT_EQ(choices->name, file);
  expect_different_in_each_row(*choices);
  for (const int layer : {1, 2}) {
    const std::vector<double> shares = choices->shares(layer);
    for (int e = 0; e < 8; ++e)
      EXPECT_NEAR(shares[e], counts[layer - 1][e] / 1000.0, 1.0 / 2048) << layer << ", " << e;
  }
  // Rows are drawn, so counts of a step have the same proportions within its noise.
  const auto drawn = counts_of(first_choices(*choices, 1, 4000));
  for (int e = 1; e < 8; ++e) EXPECT_NEAR(drawn.at(e) / 4000.0, counts[0][e] / 1000.0, 0.04) << e;
  EXPECT_FALSE(drawn.contains(0));

  // A cut model has the first layers of the statistics, and a layer for multi-token prediction
  // none.
  ModelConfig cut = config;
  cut.n_layers = 1;
  cut.n_dense_layers = 0;
  cut.n_used_mtp_layers = 1;
  const auto of_cut = simulated_choices(simulated_routing(file), cut, config);
  EXPECT_NEAR(of_cut->shares(0)[1], 0.7, 1.0 / 2048);
  EXPECT_NEAR(of_cut->shares(1)[0], 0.375, 1.0 / 2048);
  cut.router.n_experts = 4;
  EXPECT_TRUE(says(error_of([&] { simulated_choices(simulated_routing(file), cut, config); }),
                   "the memory holds 4 of the 8 experts"));
  // An expert of all tokens, and as many experts as a token has.
  const std::string three =
      with_counts(folder.file("t.json"), {{1000, 1000, 1000, 0, 0, 0, 0, 0}, counts[1]}, 3, 1000);
  EXPECT_EQ(choices_of(three, config)->shares(1)[2], 1);
}

TEST(SimulatedRouting, RefusesWhatCannotBeMeasured) {
  const ModelConfig config = r1_like();
  const auto refusal = [&](const std::string& text, int n_ranks = 1) {
    return error_of([&] { require_sound(simulated_routing(text), config, n_ranks); });
  };
  for (const char* text :
       {"model", "balanced-ranks:1", "balanced-ranks:256", "balanced-experts", "grouped-random"}) {
    EXPECT_EQ(refusal(text), "no error") << text;
    EXPECT_EQ(name_of(simulated_routing(text)), text);
  }
  EXPECT_EQ(refusal("balanced-ranks", 2), "no error");
  EXPECT_EQ(choices_of("model", config), nullptr);
  EXPECT_TRUE(says(refusal("balanced-ranks"), "say how many there would be"));
  EXPECT_TRUE(says(refusal("balanced-ranks:257"), "at most the 256 experts"));
  for (const char* text : {"balanced-ranks:", "balanced-ranks:0", "balanced-ranks:-1",
                           "balanced-ranks:8x", "balanced-ranks:99999999999"})
    EXPECT_TRUE(says(refusal(text), "expected a number of ranks")) << text;
  for (const char* text : {"32", "", "/tmp", "no/such.json"})
    EXPECT_TRUE(says(refusal(text), "choose model, balanced-ranks")) << text;
  ModelConfig small = config;
  small.router.n_experts = 8;
  small.router.n_active = 7;
  EXPECT_EQ(error_of([&] { require_sound(simulated_routing("balanced-ranks:5"), small); }),
            "--simulate-routing balanced-ranks: 2 of a token's 7 experts would be of rank 0, which "
            "has 1 of layer 1");
  small.router.n_experts = 0;
  EXPECT_TRUE(says(error_of([&] { require_sound(simulated_routing("grouped-random"), small); }),
                   "no routed experts"));
}

}  // namespace
}  // namespace tandem
