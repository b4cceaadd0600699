// Experts that a plan assigns to ranks by their measured use, with redundant ones.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <random>

#include "tests/planner_cases.h"

namespace tandem {
namespace {

// Counts of every MoE layer: the n-th expert, in an order of the layer's own, in proportion to
// 1 / sqrt(n).
RoutingStatistics skewed(const ModelConfig& c) {
  constexpr int kTokens = 100'000;
  std::mt19937 rng(3);
  nlohmann::json counts = nlohmann::json::array();
  for (int l = 0; l < c.n_layers; ++l) {
    if (!c.is_moe(l)) continue;
    std::vector<int64_t> row(c.router.n_experts);
    double sum = 0;
    for (int e = 0; e < c.router.n_experts; ++e) sum += 1 / std::sqrt(e + 1.0);
    int64_t left = int64_t{kTokens} * c.router.n_active;
    for (int e = c.router.n_experts - 1; e > 0; --e) {
      row[e] = static_cast<int64_t>(kTokens * c.router.n_active / std::sqrt(e + 1.0) / sum);
      left -= row[e];
    }
    row[0] = left;
    std::shuffle(row.begin(), row.end(), rng);
    counts.push_back(row);
  }
  const nlohmann::json file = {{"layers", c.n_layers},
                               {"experts", c.router.n_experts},
                               {"tokens", kTokens},
                               {"counts", counts}};
  return {c, file.dump(), "skewed"};
}

int redundant(const Placement& p, int layer) {
  int n = 0;
  for (const ExpertGroup& g : experts_of_layer(p, layer)->groups)
    n += static_cast<int>(g.experts.size() * (g.owners.size() - 1));
  return n;
}

// Both kinds of ranks.
struct BalancedRanks {
  const char* machine;
  bool on_cpus;
};
class PlanBalance : public testing::TestWithParam<BalancedRanks> {};

TEST_P(PlanBalance, HasTheReplicasThatAreAskedForAndEvenLoads) {
  Machine machine = known_machine(GetParam().machine);
  if (GetParam().on_cpus) {
    machine.gpus.clear();
    machine.hosts = 4;
    machine.network = {50e9, 5e-6};
  }
  const ModelConfig config = known_model("r1");
  const RoutingStatistics routing = skewed(config);
  Workload w;
  w.concurrency = 64;
  w.objective = Objective::kThroughput;
  for (const int n : {32, 30}) {
    w.redundant_experts = n;
    const Plan plan = tandem::plan({"r1", config, machine, w, routing});
    EXPECT_EQ(plan.placement.layers[0].groups[0].owners[0].is_cpu(), GetParam().on_cpus);
    EXPECT_EQ(redundant(plan.placement, 3), n);
    EXPECT_EQ(redundant(plan.placement, 60), n);
    ASSERT_TRUE(plan.balance);
    EXPECT_EQ(plan.balance->n_layers, 58);
    EXPECT_GT(plan.balance->placed, 0.99);
    EXPECT_GE(plan.balance->placed, plan.balance->own - 1e-12);
    EXPECT_GE(plan.balance->placed, plan.balance->eplb - 1e-12);
    const bool divides = n % 8 == 0;  // 4 or 8 ranks
    EXPECT_EQ(plan.balance->eplb > 0.5, divides);
  }
}

INSTANTIATE_TEST_SUITE_P(Machines, PlanBalance,
                         testing::Values(BalancedRanks{"8xh200", false},
                                         BalancedRanks{"2x9654-5090", true}));

// Layers that differ in nothing are written once.
TEST(PlanBalance, OneHostHasAllExpertsOfAllLayers) {
  Machine machine = known_machine("2x9654-5090");
  machine.gpus.clear();
  const ModelConfig config = known_model("r1");
  const RoutingStatistics routing = skewed(config);
  const Plan plan = tandem::plan({"r1", config, machine, {}, routing});
  ASSERT_EQ(plan.placement.layers.size(), 1u);
  EXPECT_EQ(plan.placement.layers[0].last, 60);
  EXPECT_FALSE(plan.balance);
}

TEST(PlanBalance, EvenRoutingHasNothingToSay) {
  const Planned planned("r1", known_machine("8xh200"));
  EXPECT_FALSE(planned.plan().balance);
}

TEST(PlanBalance, ReplicasNeedRanks) {
  const ModelConfig config = known_model("r1");
  const Machine machine = known_machine("2x9654-5090");
  const RoutingStatistics routing(config);
  Workload w;
  w.redundant_experts = 1;
  const auto refusal = [&] {
    return error_of([&] { (void)tandem::plan({"r1", config, machine, w, routing}); });
  };
  EXPECT_TRUE(says(refusal(), "--redundant 1: ")) << refusal();
  EXPECT_TRUE(says(refusal(), "room for 1 rank(s)")) << refusal();
  w.redundant_experts = -1;
  EXPECT_TRUE(says(refusal(), "--redundant -1: must be between 0 and 65536")) << refusal();
}

}  // namespace
}  // namespace tandem
