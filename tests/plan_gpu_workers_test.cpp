// Plans whose experts are on GPUs of hosts without the backbone: what requests to such workers
// cost, how they are started, and what of the plan is not executed.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "offload/plan/layer_time.h"
#include "offload/plan/roles.h"
#include "offload/simulation/worker_faults.h"
#include "tests/planner_cases.h"

namespace tandem {
namespace {

// A box whose GPU holds R1's backbone, and `n` hosts of `n_gpus` GPUs which hold its experts and
// whose CPUs are slow.
Machine gpu_boxes(int n, int n_gpus, int64_t gpu_bytes = 200'000'000'000) {
  Machine m = round_kinds(n);
  HostKind& boxes = m.other_kinds[0];
  boxes.label = "GPU workers";
  Gpu gpu = m.gpus[0];
  gpu.memory_bytes = gpu_bytes;
  gpu.h2d_bytes_per_second = 20e9;
  gpu.d2h_bytes_per_second = 25e9;
  boxes.gpus.assign(n_gpus, gpu);
  boxes.nodes[0].memory_bytes = 64'000'000'000;
  boxes.nodes[0].read_bytes_per_second = 20e9;
  m.nodes[0] = {8, 64'000'000'000, 20e9};
  return m;
}

bool gives(const Plan& plan, const std::string& text) {
  return std::any_of(plan.reasons.begin(), plan.reasons.end(), [&](const std::string& reason) {
    return reason.find(text) != std::string::npos;
  });
}

TEST(GpuWorkers, AreDevicesOfHostsWithoutTheBackbone) {
  const Placement p = with_owners({{range(0, 64), {{0, -1}}},
                                   {range(64, 128), {{1, 1}}},
                                   {range(128, 256), {{1, 0}, {2, -1}}}});
  EXPECT_EQ(worker_devices(p), (std::vector<DeviceId>{{1, 0}, {1, 1}, {2, -1}}));
  EXPECT_EQ(worker_hosts(p), (std::vector{1, 2}));
  EXPECT_TRUE(worker_devices(with_owners({{range(0, 256), {{0, 1}}}})).empty())
      << "the backbone's host has no workers";
}

// 8 tokens; two GPUs of host 1 have 64 experts each and that of host 2 has 128.
TEST(GpuWorkers, ARoundTripByHand) {
  Machine m = gpu_boxes(2, 2);
  m.request_seconds = 30e-6;
  const ModelConfig r1 = known_model("r1");
  const RoutingStatistics routing(r1);
  const Workload w;
  const PlanInput in = {r1, m, w, routing};
  const auto exchange = [&](const Placement& p, double replicas) {
    return LayerModel(in, p, {8, 1024, false, replicas})
        .layer(p.stages[0], 3, &p.layers[0])[Part::kExchange];
  };
  Placement p = with_owners(
      {{range(0, 64), {{1, 0}}}, {range(64, 128), {{1, 1}}}, {range(128, 256), {{2, 0}}}});
  const double uses_quarter = 1 - std::pow(0.75, 8), uses_half = 1 - std::pow(0.5, 8);
  const double row = 8 * 7168;
  // Handed down by the backbone's GPU, to the GPU of host 2 and back, as floats there.
  const double copies = 2 * 10e-6 + 2 * row * 2 / 10e9;
  const double of_worker = 2 * 10e-6 + row * 4 * uses_half * (1 / 20e9 + 1 / 25e9);
  const double sent = row * (2 * uses_quarter + uses_half) * (2 + 4) / 10e9;
  EXPECT_NEAR(exchange(p, 1), 2 * 5e-6 + sent + 30e-6 * 4 / 2 + copies + of_worker, 1e-12);
  // The network of host 1 has the rows of both its workers, of two replicas.
  m.hosts = 2;
  for (ExpertGroup& group : p.layers[0].groups)
    for (DeviceId& d : group.owners) ++d.host;
  p.stages[0].devices = {{0, 0}, {1, 0}};
  const double host_1 = 2 * row * 2 * uses_quarter * (2 + 4) / 10e9;
  const double of_both = of_worker + row * 4 * uses_half * (1 / 20e9 + 1 / 25e9);
  EXPECT_NEAR(exchange(p, 2), 2 * 5e-6 + host_1 + 30e-6 * 4 / 2 + copies + of_both, 1e-12);
}

TEST(GpuWorkers, AreStartedOnTheirGpus) {
  Workload w;
  w.concurrency = 4;
  const Plan plan = Planned("r1", gpu_boxes(2, 2), w).plan();
  EXPECT_EQ(worker_devices(plan.placement),
            (std::vector<DeviceId>{{1, 0}, {1, 1}, {2, 0}, {2, 1}}));
  const std::vector<std::string> commands = {
      "host1: CUDA_VISIBLE_DEVICES=0 tandem worker r1 --device cuda --experts 0-63 --listen "
      "host1:9000 --worker-secret KEY",
      "host1: CUDA_VISIBLE_DEVICES=1 tandem worker r1 --device cuda --experts 64-127 --listen "
      "host1:9001 --worker-secret KEY",
      "host2: CUDA_VISIBLE_DEVICES=0 tandem worker r1 --device cuda --experts 128-191 --listen "
      "host2:9000 --worker-secret KEY",
      "host2: CUDA_VISIBLE_DEVICES=1 tandem worker r1 --device cuda --experts 192-255 --listen "
      "host2:9001 --worker-secret KEY",
      "host0: tandem serve r1 --workers host1:9000,host1:9001,host2:9000,host2:9001 --device cuda "
      "--ctx 8192 --worker-secret KEY"};
  EXPECT_EQ(plan.commands, commands);
  EXPECT_TRUE(gives(plan, "host1 (GPU workers) is a worker with 64 experts on a GPU;"));
  EXPECT_TRUE(gives(plan, "requests to 4 worker(s) take"));
  EXPECT_FALSE(gives(plan, "not executed: `tandem serve`"));
  EXPECT_FALSE(gives(plan, "not executed: a worker's GPU"));
}

// One GPU a host needs no choice, and many workers are named together.
TEST(GpuWorkers, OfManyHostsAreSaidTogether) {
  const Plan plan = Planned("r1", gpu_boxes(8, 1, 90'000'000'000)).plan();
  ASSERT_EQ(plan.commands.size(), 9u);
  EXPECT_EQ(plan.commands[7],
            "host8: tandem worker r1 --device cuda --experts 224-255 --listen host8:9000 "
            "--worker-secret KEY");
  EXPECT_TRUE(gives(plan,
                    "host1 (GPU workers) and 7 more are workers with 32 experts each on a "
                    "GPU"));
}

// Every worker costs a request, so not all hosts are used. Their own network is too slow for a
// pipeline.
TEST(GpuWorkers, MoreHostsAreNotSlower) {
  const auto planned = [](int n_hosts) {
    Machine m = gpu_boxes(n_hosts, 2);
    m.other_kinds[0].network = {0.2e9, 5e-3};
    Workload w;
    w.concurrency = 4;
    return Planned("r1", m, w).plan();
  };
  const Plan two = planned(2), many = planned(12);
  EXPECT_EQ(worker_hosts(two.placement).size(), 2u);
  ASSERT_FALSE(worker_hosts(many.placement).empty());
  EXPECT_LT(worker_hosts(many.placement).size(), 12u);
  EXPECT_LE(many.prediction.score, two.prediction.score * 1.0001);
}

// A worker has the same experts in every layer, whatever each layer's routers prefer.
TEST(GpuWorkers, HaveTheSameExpertsOfEveryLayer) {
  const Planned even("r1", gpu_boxes(2, 2));
  nlohmann::json counts = nlohmann::json::array();
  for (int l = 3; l < even.config.n_layers; ++l) {
    std::vector<int> uses(256);
    for (int e = 0; e < 256; ++e) uses[e] = 1 + (e * 37 + l * 11) % 256;
    counts.push_back(uses);
  }
  const nlohmann::json statistics = {
      {"layers", 61}, {"experts", 256}, {"tokens", 4112}, {"counts", counts}};
  const RoutingStatistics routing(even.config, statistics.dump(), "s");
  const Plan plan = tandem::plan({"r1", even.config, even.machine, even.request.workload, routing});
  ASSERT_EQ(worker_devices(plan.placement).size(), 4u);
  EXPECT_EQ(plan.placement.layers.size(), 1u);
  size_t n_experts = 0;
  const auto roles = roles_of({"r1", even.config, even.machine, plan.workload, routing},
                              plan.placement, plan.prediction);
  ASSERT_TRUE(roles);
  for (const WorkerRole& worker : roles->workers) n_experts += worker.experts.size();
  EXPECT_EQ(n_experts, 256u) << "each in one worker";
}

TEST(GpuWorkers, SaysWhatIsNotExecuted) {
  Workload w;
  w.concurrency = 4;
  w.experts = WeightFormat{DType::kI4TwoLevel, 64};
  const Planned packed("r1", gpu_boxes(2, 2), w);
  const Plan plan = packed.plan();
  ASSERT_FALSE(worker_devices(plan.placement).empty());
  ASSERT_FALSE(worker_devices(plan.placement)[0].is_cpu());
  EXPECT_TRUE(gives(plan, "not executed: a worker's GPU keeps experts as the checkpoint"));
  EXPECT_EQ(plan.commands[0].find("--format"), std::string::npos);
  // Several replicas of the backbone.
  Placement p = with_owners({{range(0, 128), {{2, 0}}}, {range(128, 256), {{3, 0}}}});
  p.stages[0].devices = {{0, 0}, {1, 0}};
  Machine m = gpu_boxes(2, 1, 400'000'000'000);
  m.hosts = 2;
  const Planned two("r1", m);
  const auto roles = roles_of(two.request, p, predict({two.config, m, {}, two.routing}, p));
  ASSERT_TRUE(roles);
  const auto words =
      roles_in_words(two.request, *roles, p, predict({two.config, m, {}, two.routing}, p));
  EXPECT_TRUE(says(words.back(), "not executed: `tandem serve` has its backbone on one device"));
  EXPECT_TRUE(says(words.back(), "not on 2"));
}

// Packed INT4 is BF16 there, which needs no option.
TEST(GpuWorkers, KeepPackedInt4AsBf16) {
  Planned packed("r1", gpu_boxes(2, 1, 800'000'000'000));
  packed.config.expert_group = 32;
  Placement p = with_owners({{range(0, 128), {{1, 0}}}, {range(128, 256), {{2, 0}}}});
  const auto says_so_of = [&](WeightFormat format) {
    for (ExpertGroup& group : p.layers[0].groups) group.format = format;
    const Prediction now =
        predict({packed.config, packed.machine, packed.request.workload, packed.routing}, p);
    const auto roles = roles_of(packed.request, p, now);
    const auto words = roles_in_words(packed.request, roles.value(), p, now);
    return std::any_of(words.begin(), words.end(), [](const std::string& text) {
      return text.starts_with("not executed: a worker's GPU");
    });
  };
  EXPECT_FALSE(says_so_of({DType::kBF16}));
  EXPECT_TRUE(says_so_of({DType::kI4, 32}));
}

// A worker that is back reads what its GPU had.
TEST(GpuWorkers, FailAsOthersDo) {
  const Machine m = gpu_boxes(2, 1, 800'000'000'000);
  const ModelConfig r1 = known_model("r1");
  const RoutingStatistics routing(r1);
  Workload w;
  w.concurrency = 4;
  const Placement p = with_owners({{range(0, 256), {{1, 0}, {2, 0}}}});
  const FaultRun run =
      simulate_faults({r1, m, w, routing}, p, {.n_faults = 10, .mean_interval_seconds = 1000});
  for (const SimulatedFault& fault : run.faults) {
    const double load = 58 * 256 * 44.05e6 / 5e9;
    EXPECT_NEAR(fault.back_at - fault.at, (fault.fault == WorkerFault::kHung ? 65 : 5) + load, 1);
  }
}

// What a standby loads has other bits than what a GPU computes.
TEST(GpuWorkers, HaveNoStandbys) {
  const Placement p = with_owners({{range(0, 128), {{1, 0}}}, {range(128, 256), {{2, -1}}}});
  const auto shards = worker_shards(known_model("r1"), p);
  ASSERT_EQ(shards.size(), 1u);
  EXPECT_EQ(shards[0].hosts, std::vector{2});
  EXPECT_EQ(shards[0].experts, range(128, 256));
}

}  // namespace
}  // namespace tandem
