// The cluster simulation against cases computed by hand.
#include "offload/simulation/simulate.h"

#include <gtest/gtest.h>

#include "offload/balance/assign.h"
#include "tests/planner_cases.h"

namespace tandem {
namespace {

// Every token uses every expert, so routing is deterministic.
SimulatedCluster certain(int n_ranks) {
  SimulatedCluster c;
  c.n_ranks = n_ranks;
  c.n_experts = c.top_k = n_ranks;
  for (int e = 0; e < n_ranks; ++e) c.owners.push_back({e});
  return c;
}

TEST(Simulate, OneRankAddsUp) {
  SimulatedCluster c = certain(1);
  c.n_layers = 5;
  c.tokens_per_rank = 3;
  c.backbone_seconds = 1;
  c.backbone_seconds_per_token = 0.5;
  c.expert_seconds = 2;  // reading takes longer than 3 rows
  c.expert_seconds_per_row = 0.25;
  c.dispatch_bytes = c.combine_bytes = 1e12;  // no message leaves the rank
  const Simulation s = simulate(c);
  EXPECT_DOUBLE_EQ(s.seconds, 5 * (1 + 3 * 0.5 + 2));
  EXPECT_DOUBLE_EQ(s.compute_share, 1);
  EXPECT_DOUBLE_EQ(s.link_share, 0);
}

TEST(Simulate, TwoRanksWaitForMessages) {
  SimulatedCluster c = certain(2);
  c.n_layers = 2;
  c.tokens_per_rank = 4;
  c.backbone_seconds = 1;
  c.expert_seconds = 2;
  c.expert_seconds_per_row = 0.75;  // 8 rows: 6 s
  c.link_bytes_per_second = 10;
  c.link_latency_seconds = 0.25;
  c.dispatch_bytes = 5;   // 4 copies: 2 s
  c.combine_bytes = 7.5;  // 3 s
  const Simulation s = simulate(c);
  const SimulatedLayer& first = s.layers[0];
  EXPECT_DOUBLE_EQ(first.backbone_end, 1);
  EXPECT_DOUBLE_EQ(first.dispatch_end, 1 + 2 + 0.25);
  EXPECT_DOUBLE_EQ(first.experts_end, 3.25 + 6);
  EXPECT_DOUBLE_EQ(first.combine_end, 9.25 + 3 + 0.25);
  EXPECT_DOUBLE_EQ(s.seconds, 2 * 12.5);
  EXPECT_DOUBLE_EQ(s.compute_share, 7 / 12.5);
  EXPECT_DOUBLE_EQ(s.link_share, 5 / 12.5);
  EXPECT_DOUBLE_EQ(first.balance, 1);
}

// A token has two experts on each of two ranks.
TEST(Simulate, ARowGoesOnceToARank) {
  SimulatedCluster c;
  c.n_ranks = 2;
  c.n_experts = c.top_k = 4;
  c.owners = {{0}, {0}, {1}, {1}};
  c.tokens_per_rank = 4;
  c.backbone_seconds = 1;
  c.expert_seconds = 2;
  c.link_bytes_per_second = 10;
  c.dispatch_bytes = 5;   // 4 rows: 2 s
  c.combine_bytes = 7.5;  // 3 s
  const SimulatedLayer layer = simulate(c).layers[0];
  EXPECT_DOUBLE_EQ(layer.dispatch_end, 1 + 2);
  EXPECT_DOUBLE_EQ(layer.combine_end, layer.experts_end + 3);
}

// Two hosts of two ranks, and a token has an expert on each rank: it crosses once to the other
// host, and goes to the other rank of its own over a link beside the network.
TEST(Simulate, ARowCrossesOnceToEachHost) {
  SimulatedCluster c;
  c.n_ranks = c.n_experts = c.top_k = 4;
  c.owners = {{0}, {1}, {2}, {3}};
  c.tokens_per_rank = 4;
  c.backbone_seconds = 1;
  c.expert_seconds = 2;
  c.link_bytes_per_second = 10;
  c.dispatch_bytes = 5;
  c.combine_bytes = 7.5;
  const SimulatedLayer each = simulate(c).layers[0];
  EXPECT_DOUBLE_EQ(each.dispatch_end, 1 + 3 * 2) << "4 copies to each of 3 other ranks";
  c.host_of = {0, 0, 1, 1};
  const SimulatedLayer once = simulate(c).layers[0];
  EXPECT_DOUBLE_EQ(once.dispatch_end, 1 + 2);
  EXPECT_DOUBLE_EQ(once.combine_end, once.experts_end + 3);
  c.near_bytes_per_second = 4;  // slower than the network
  EXPECT_DOUBLE_EQ(simulate(c).layers[0].dispatch_end, 1 + 5);
}

// Both experts are on the first of two hosts of two ranks, so rows of its own tokens leave it only
// where rows go to all hosts: to one rank of the other.
TEST(Simulate, RowsOfDecodeGoToAllHosts) {
  SimulatedCluster c;
  c.n_ranks = 4;
  c.n_experts = c.top_k = 2;
  c.owners = {{0}, {1}};
  c.host_of = {0, 0, 1, 1};
  c.tokens_per_rank = 4;
  c.link_bytes_per_second = 10;
  c.dispatch_bytes = 5;   // 4 rows: 2 s
  c.combine_bytes = 7.5;  // 3 s
  const auto busy = [&] {
    const Simulation s = simulate(c);
    return s.link_share * s.seconds * c.n_ranks;
  };
  EXPECT_DOUBLE_EQ(busy(), 2 * (2 + 3));
  c.to_all_hosts = true;
  EXPECT_DOUBLE_EQ(busy(), 4 * (2 + 3));
  c.host_of = {};
  EXPECT_TRUE(says(error_of([&] { simulate(c); }), "hosts of 0"));
}

// One rank has the tokens, two ranks have one expert each. As on CPUs, reading is added to
// computing.
TEST(Simulate, SeparateBackboneAndExperts) {
  SimulatedCluster c;
  c.n_ranks = 3;
  c.n_backbone_ranks = 1;
  c.n_experts = c.top_k = 2;
  c.owners = {{1}, {2}};
  c.n_layers = 2;
  c.tokens_per_rank = 4;
  c.backbone_seconds = 1;
  c.expert_seconds = 2;
  c.expert_seconds_per_row = 0.5;  // 4 rows take 2 s more
  c.reading_hides = false;
  c.link_bytes_per_second = 10;
  c.dispatch_bytes = 5;   // 4 copies to each rank: 2 s, one after the other
  c.combine_bytes = 7.5;  // 3 s, each over its own link
  const Simulation s = simulate(c);
  const SimulatedLayer& first = s.layers[0];
  EXPECT_DOUBLE_EQ(first.backbone_end, 1);
  EXPECT_DOUBLE_EQ(first.dispatch_end, 1 + 2 + 2);
  EXPECT_DOUBLE_EQ(first.experts_end, 5 + 4);
  EXPECT_DOUBLE_EQ(first.combine_end, 9 + 3);
  EXPECT_DOUBLE_EQ(s.seconds, 2 * 12);
  EXPECT_DOUBLE_EQ(first.balance, 1) << "of those that hold experts";
  EXPECT_DOUBLE_EQ(s.compute_share, (2 * 1 + 2 * 4 + 2 * 4) / 3.0 / 24);
  // The first expert's rank is on the same host, so only the other expert's rows use the link.
  c.link_of = {0, 0, 1};
  const Simulation near = simulate(c);
  EXPECT_DOUBLE_EQ(near.layers[0].dispatch_end, 1 + 2);
  EXPECT_DOUBLE_EQ(near.layers[0].combine_end, 3 + 4 + 3);
  c.reading_hides = true;
  EXPECT_DOUBLE_EQ(simulate(c).layers[0].combine_end, 3 + 2 + 3);
  // Reassigned experts stay on the ranks that have experts.
  c.balanced = true;
  EXPECT_DOUBLE_EQ(simulate(c).layers[0].backbone_end, 1);
  c.n_backbone_ranks = 4;
  EXPECT_TRUE(says(error_of([&] { simulate(c); }), "3 ranks with 4 backbones"));
}

// In one of two batches backbone and experts take 1 each and each message takes 1, so alone it
// takes 4 a layer, of which 2 are computing. Two batches keep the rank computing until the last
// message.
TEST(Simulate, TwoBatchesHideMessages) {
  SimulatedCluster c = certain(2);
  c.n_layers = 10;
  c.tokens_per_rank = 2;
  c.backbone_seconds_per_token = 1;
  c.expert_seconds_per_row = 0.5;  // 2 rows in one batch
  c.link_bytes_per_second = 1;
  c.dispatch_bytes = c.combine_bytes = 1;
  const double one = simulate(c).seconds;
  EXPECT_DOUBLE_EQ(one, 10 * (2 + 2 + 2 + 2));
  c.two_batches = true;
  const Simulation two = simulate(c);
  // Computing takes 4 a layer without gaps; the last message follows.
  EXPECT_DOUBLE_EQ(two.seconds, 10 * 4 + 1);
  EXPECT_NEAR(two.compute_share, 40 / 41.0, 1e-12);
}

TEST(Simulate, TwoBatchesCostWhatTheyReadTwice) {
  SimulatedCluster c = certain(2);
  c.tokens_per_rank = 2;
  c.expert_seconds = 3;  // time to read an expert, for any number of rows
  const double one = simulate(c).seconds;
  c.two_batches = true;
  EXPECT_DOUBLE_EQ(simulate(c).seconds, 2 * one);
}

TEST(Simulate, CopiesOfHotExpertsEvenTheLoad) {
  SimulatedCluster c;
  c.n_ranks = 8;
  c.n_layers = 4;
  c.tokens_per_rank = 64;
  c.n_experts = 64;
  c.top_k = 4;
  c.skew = 1;
  c.expert_seconds_per_row = 1e-6;
  for (int e = 0; e < c.n_experts; ++e) c.owners.push_back({e / 8});
  const Simulation plain = simulate(c);
  // Two copies of each expert: several ranks can compute the most used ones.
  c.owners = assign_experts(std::vector<double>(64, 1.0 / 16), 8, 64);
  const Simulation copied = simulate(c);
  EXPECT_LT(copied.seconds, plain.seconds);
  EXPECT_GT(copied.layers[0].balance, plain.layers[0].balance);
  // Assigning experts by their use in each layer is faster still.
  c.balanced = true;
  c.n_redundant = 64;
  EXPECT_LT(simulate(c).seconds, copied.seconds);
  for (const SimulatedLayer& l : plain.layers) {
    EXPECT_GT(l.balance, 1.0 / 8);
    EXPECT_LT(l.balance, 0.9);
  }
}

TEST(Simulate, SameSeedSameSteps) {
  SimulatedCluster c;
  c.n_ranks = 4;
  c.tokens_per_rank = 16;
  c.n_experts = 32;
  c.top_k = 4;
  c.expert_seconds_per_row = 1e-6;
  for (int e = 0; e < c.n_experts; ++e) c.owners.push_back({e % 4});
  EXPECT_EQ(simulate(c).seconds, simulate(c).seconds);
  SimulatedCluster other = c;
  other.n_layers = 50;
  c.n_layers = 50;
  other.seed = 2;
  EXPECT_NE(simulate(c).seconds, simulate(other).seconds);
}

// With even routing the predicted and the simulated time of a layer are close.
TEST(Simulate, AgreesWithThePredictionForEvenRouting) {
  Workload w = throughput_of_clusters();
  w.concurrency = 1024;
  const Planned planned("r1", known_machine("16xh800"), w);
  const Plan plan = planned.plan();
  const PlanInput in = {planned.config, planned.machine, plan.workload, planned.routing};
  SimulatedCluster c = cluster_of(in, plan.placement, 0);
  c.n_layers = 4;
  EXPECT_NEAR(simulate(c).seconds / 4, plan.prediction.decode.moe.seconds,
              0.25 * plan.prediction.decode.moe.seconds);
  EXPECT_FALSE(c.to_all_hosts);
  const auto dim = planned.config.dim;
  EXPECT_EQ(c.combine_bytes, 4. * dim);
  // Steps that the GPUs of two hosts record.
  w.concurrency = 256;
  for (const ExpertRows rows : {ExpertRows::kExact, ExpertRows::kFp8}) {
    w.expert_rows = rows;
    const Planned few("r1", known_machine("16xh800"), w);
    const Plan recorded = few.plan();
    ASSERT_EQ(recorded.placement.stages[0].tp, 1);
    c = cluster_of({few.config, few.machine, recorded.workload, few.routing}, recorded.placement,
                   0);
    EXPECT_TRUE(c.to_all_hosts);
    EXPECT_EQ(c.combine_bytes, 4. * dim);
    c.n_layers = 4;
    EXPECT_NEAR(simulate(c).seconds / 4, recorded.prediction.decode.moe.seconds,
                0.25 * recorded.prediction.decode.moe.seconds)
        << name_of(rows);
  }
  w.expert_rows = ExpertRows::kExact;
  // Separate roles: experts on the CPUs of 32 hosts, each with a backbone on its GPU.
  w.concurrency = 256;
  const Planned home("r1", known_machine("home-32x4090"), w);
  const Plan at_home = home.plan();
  ASSERT_TRUE(at_home.placement.layers[0].groups[0].owners[0].is_cpu());
  c = cluster_of({home.config, home.machine, at_home.workload, home.routing}, at_home.placement, 0);
  EXPECT_EQ(c.n_ranks, 64);
  EXPECT_EQ(c.n_backbone_ranks, 32);
  c.n_layers = 4;
  EXPECT_NEAR(simulate(c).seconds / 4, at_home.prediction.decode.moe.seconds,
              0.25 * at_home.prediction.decode.moe.seconds);
  EXPECT_TRUE(says(
      error_of([&] {
        const Planned one("r1", known_machine("2x6454s-4090"));
        const Plan single = one.plan();
        cluster_of({one.config, one.machine, single.workload, one.routing}, single.placement, 0);
      }),
      "spread over GPUs, or over the CPUs of several hosts"));
}

// Each change spoils one more thing: the first of several is named.
TEST(Simulate, RefusesImpossibleClusters) {
  SimulatedCluster c = certain(2);
  const auto refusal = [&] { return error_of([&] { simulate(c); }); };
  EXPECT_EQ(refusal(), "no error");
  c.skew = 11;
  EXPECT_EQ(refusal(),
            "a simulation with links of 1000000000 B/s and a skew of 11: must be above 0, and 0 to "
            "10");
  c.n_backbone_ranks = 3;
  EXPECT_EQ(refusal(), "a simulation of 2 ranks with 3 backbones, links of 0 and hosts of 0");
  c.top_k = 3;
  EXPECT_EQ(
      refusal(),
      "a simulation with top_k 3 of 2 experts and owners of 2 of them: top_k must be at least "
      "1 and at most the number of experts, and each expert needs owners");
  c.tokens_per_rank = 2'000'000'000;
  EXPECT_EQ(refusal(),
            "a simulation of 2000000000 tokens on each of 2 ranks through 1 layers is too large: "
            "take fewer tokens or layers");
  c.n_layers = 0;
  EXPECT_EQ(refusal(),
            "a simulation of 2 ranks, 0 layers and 2000000000 tokens a rank: must be 1 to 4096, 1 "
            "to 4096 and at least 1");

  // The limits themselves.
  const auto with = [](auto change) {
    SimulatedCluster changed = certain(2);
    change(changed);
    return error_of([&] { simulate(changed); });
  };
  EXPECT_EQ(with([](auto& x) { x.n_layers = 4096; }), "no error");
  EXPECT_NE(with([](auto& x) { x.n_layers = 4097; }), "no error");
  EXPECT_NE(with([](auto& x) { x.tokens_per_rank = 0; }), "no error");
  EXPECT_EQ(with([](auto& x) { x.n_backbone_ranks = 2; }), "no error");
  EXPECT_NE(with([](auto& x) { x.n_backbone_ranks = -1; }), "no error");
  EXPECT_EQ(with([](auto& x) { x.skew = 10; }), "no error");
  EXPECT_NE(with([](auto& x) { x.skew = -0.1; }), "no error");
  EXPECT_NE(with([](auto& x) { x.link_bytes_per_second = 0; }), "no error");
  EXPECT_NE(with([](auto& x) { x.link_of = {0}; }), "no error");
  EXPECT_NE(with([](auto& x) { x.top_k = 0; }), "no error");
  EXPECT_NE(with([](auto& x) { x.owners.pop_back(); }), "no error");
}

}  // namespace
}  // namespace tandem
