// Hosts that replace lost workers: which ones, what they must hold, and what they save.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "model/cost.h"
#include "offload/plan/roles.h"
#include "offload/simulation/worker_faults.h"
#include "tests/planner_cases.h"

namespace tandem {
namespace {

const WeightFormat kStoredR1 = {DType::kF8E4M3};
// All layers of one expert of R1.
int64_t expert_bytes() { return 58 * routed_expert_bytes(known_model("r1"), kStoredR1); }

TEST(Standbys, AreTheLastHostsOfAKindOfWorkers) {
  Planned planned("r1", known_machine("office-4090-3x256gb"));
  planned.request.n_standbys = 1;
  const Plan plan = planned.plan();
  EXPECT_EQ(plan.standbys, std::vector{3});
  EXPECT_EQ(worker_hosts(plan.placement), (std::vector{1, 2}));
  for (const DeviceMemory& m : plan.prediction.memory) {
    EXPECT_TRUE(m.device.host != 3 || m.weights_bytes == 0);
  }
  ASSERT_EQ(plan.commands.size(), 4u);
  EXPECT_TRUE(
      says(plan.commands[2], "host3: tandem worker r1 --experts standby --listen host3:9000"));
  EXPECT_TRUE(says(plan.commands[3], "--workers host1:9000,host2:9000,host3:9000"));
  const auto shards = worker_shards(planned.config, plan.placement);
  const double gb = static_cast<double>(largest_shard_bytes(shards)) * 1e-9;
  EXPECT_TRUE(std::any_of(plan.reasons.begin(), plan.reasons.end(), [&](const std::string& r) {
    return r.find(fmt::format("standby: host3 (memory box) loads what a lost worker had, at most "
                              "{:.1f} GB, in {:.1f} s",
                              gb, gb / 6.5)) != std::string::npos;
  }));
  // The same as planning for a machine without that host.
  Machine fewer = known_machine("office-4090-3x256gb");
  --fewer.other_kinds[0].hosts;
  EXPECT_DOUBLE_EQ(plan.prediction.score, Planned("r1", fewer).plan().prediction.score);
}

// Hosts of later kinds keep their numbers.
TEST(Standbys, MayComeBeforeOtherHosts) {
  const Machine m = known_machine("office-4090-3x256gb");
  Machine turned = m;
  static_cast<HostKind&>(turned) = m.other_kinds[0];
  turned.other_kinds = {static_cast<const HostKind&>(m)};
  Planned planned("r1", turned);
  planned.request.n_standbys = 1;
  const Plan plan = planned.plan();
  EXPECT_EQ(plan.standbys, std::vector{2});
  EXPECT_EQ(plan.placement.stages[0].devices, (std::vector<DeviceId>{{3, 0}}));
  EXPECT_EQ(worker_hosts(plan.placement), (std::vector{0, 1}));
  check_placement(planned.config, turned, plan.placement);
}

// A kind that the plan does not use, or uses least, gives the standbys.
TEST(Standbys, AreOfTheKindThatIsMissedLeast) {
  Machine m = round_kinds(2);
  for (NumaNode& node : m.nodes) node.memory_bytes = 50'000'000'000;
  HostKind slow = m.other_kinds[0];
  m.other_kinds[0].nodes.push_back(m.other_kinds[0].nodes[0]);
  m.other_kinds[0].cross_read_bytes_per_second = 50e9;
  slow.label = "slow box";
  slow.nodes[0].read_bytes_per_second = 1e9;
  slow.hosts = 1;
  for (const bool first : {false, true}) {
    Machine with = m;
    with.other_kinds.insert(first ? with.other_kinds.begin() : with.other_kinds.end(), slow);
    Planned planned("r1", with);
    planned.request.n_standbys = 1;
    const Plan plan = planned.plan();
    EXPECT_EQ(plan.standbys, std::vector{first ? 1 : 3});
    EXPECT_EQ(worker_hosts(plan.placement), (first ? std::vector{2, 3} : std::vector{1, 2}));
    EXPECT_EQ(with.host(plan.standbys[0]).label, "slow box");
    const NumaColumns columns = {{}, {}, {1024, 1024}};
    EXPECT_EQ(plan.placement.numa_columns, (first ? columns : NumaColumns{{}, {1024, 1024}, {}}));
  }
}

TEST(Standbys, MustHoldWhatAWorkerLoses) {
  Machine m = round_kinds(2);
  for (NumaNode& node : m.nodes) node.memory_bytes = 50'000'000'000;
  HostKind small = m.other_kinds[0];
  small.label = "small box";
  small.hosts = 1;
  small.nodes[0].memory_bytes = 100'000'000'000;
  m.other_kinds.push_back(small);
  m.other_kinds[0].hosts = 1;
  Planned planned("r1", m);
  planned.request.n_standbys = 1;
  const std::string error = error_of([&] { planned.plan(); });
  EXPECT_TRUE(says(error, "--standbys 1: "));
  EXPECT_TRUE(says(error, "host2 (small box) has 96.0 GB for the "));
  m.other_kinds[1].nodes[0].memory_bytes = 1'000'000'000'000;
  Planned larger("r1", m);
  larger.request.n_standbys = 1;
  EXPECT_EQ(larger.plan().standbys.size(), 1u);
}

TEST(Standbys, RefusesWhatCannotBe) {
  Planned office("r1", known_machine("office-4090-3x256gb"));
  const auto refused = [&](Planned& planned, int n) {
    planned.request.n_standbys = n;
    return error_of([&] { planned.plan(); });
  };
  EXPECT_TRUE(says(refused(office, -1), "--standbys -1: must be at least 0 and less than the 4"));
  EXPECT_TRUE(says(refused(office, 4), "--standbys 4: must be"));
  EXPECT_TRUE(says(refused(office, 3), "does not fit"));
  Planned gpus("r1", known_machine("16xh800"));
  EXPECT_TRUE(says(refused(gpus, 1), "--standbys 1: "));
  office.request.n_standbys = 0;
  const Placement placement = office.plan().placement;
  office.request.n_standbys = 1;
  EXPECT_TRUE(says(error_of([&] { assess(office.request, placement); }), "leave out --placement"));
}

TEST(Standbys, ShardsHaveTheSameOwners) {
  const ModelConfig r1 = known_model("r1");
  // 16 of the backbone's, 100 of the first worker's alone, 40 of both, 100 of the second's.
  const Placement p = with_owners({{range(0, 16), {{0, -1}}},
                                   {range(16, 116), {{1, -1}}},
                                   {range(116, 156), {{1, -1}, {2, -1}}},
                                   {range(156, 256), {{2, -1}}}});
  const std::vector<WorkerShard> shards = worker_shards(r1, p);
  ASSERT_EQ(shards.size(), 3u);
  EXPECT_EQ(shards[0].experts, range(16, 116));
  EXPECT_EQ(shards[1].hosts, (std::vector{1, 2}));
  EXPECT_EQ(shards[1].experts, range(116, 156));
  EXPECT_EQ(shards[2].bytes, 100 * expert_bytes());
  EXPECT_EQ(largest_shard_bytes(shards), 100 * expert_bytes());
  // An expert that the backbone has too is never lost.
  EXPECT_TRUE(worker_shards(r1, with_owners({{range(0, 256), {{0, -1}, {1, -1}}}})).empty());
}

// Two workers without replicas, and hosts 3 and 4 as standbys.
struct Replaced {
  FaultRun run(const FaultOptions& options) const {
    return simulate_faults({config, machine, workload, routing}, placement, options);
  }
  // Reading 128 experts of every layer.
  double load() const { return static_cast<double>(128 * expert_bytes()) / 5e9; }
  double step() const {
    return predict({config, machine, workload, routing}, placement).decode.step_seconds;
  }
  ModelConfig config = known_model("r1");
  Machine machine = round_kinds(4);
  RoutingStatistics routing{config};
  Workload workload = [] {
    Workload four;
    four.concurrency = 4;
    return four;
  }();
  Placement placement = with_owners({{range(0, 128), {{1, -1}}}, {range(128, 256), {{2, -1}}}});
};

TEST(StandbyFaults, AnswersWaitForTheLoad) {
  const Replaced f;
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    FaultOptions options = {.n_faults = 1, .restart_seconds = 200, .seed = seed};
    EXPECT_EQ(f.run(options).n_lost, 4) << "10 s are too short";
    options.standbys = {3};
    const FaultRun run = f.run(options);
    const SimulatedFault& fault = run.faults[0];
    EXPECT_EQ(run.n_lost, 0);
    EXPECT_EQ(fault.standby, 3);
    const double noticed = fault.fault == WorkerFault::kHung ? 0.5 : 0;
    EXPECT_NEAR(fault.loaded_at - fault.at, noticed + 1 + f.load(), 1e-6);
    EXPECT_NEAR(run.longest_gap_seconds, noticed + 1 + f.load(), 3 * f.step());
    // A patience of less than two seconds is a shorter wait before the order.
    options.patience_seconds = 0.5;
    EXPECT_NEAR(f.run(options).faults[0].loaded_at - fault.at, noticed + 0.25 + f.load(), 1e-6);
  }
}

TEST(StandbyFaults, AWorkerThatIsBackFirstEndsTheWait) {
  Replaced f;
  f.machine.other_kinds[0].disk_read_bytes_per_second = 0;  // loading takes no time
  const FaultRun quick = f.run({.n_faults = 1, .restart_seconds = 0.3, .standbys = {3}, .seed = 2});
  ASSERT_NE(quick.faults[0].fault, WorkerFault::kHung);
  EXPECT_NEAR(quick.longest_gap_seconds, 0.3, 3 * f.step());
}

// What was loaded stays: the same worker's next loss costs nothing.
TEST(StandbyFaults, KeepWhatTheyHaveLoaded) {
  const Replaced f;
  const FaultRun run =
      f.run({.n_faults = 12, .mean_interval_seconds = 5000, .standbys = {3, 4}, .seed = 3});
  std::set<int> loaded;
  for (const SimulatedFault& fault : run.faults) {
    EXPECT_EQ(fault.standby >= 0, loaded.insert(fault.host).second) << fault.host;
    EXPECT_EQ(fault.step_seconds > 0, fault.standby < 0);
  }
  EXPECT_EQ(loaded.size(), 2u);
  EXPECT_EQ(run.n_lost, 0);
  EXPECT_GT(run.tokens_per_second, run.without_faults * 0.9) << "owners are one more";
}

// Every expert has two owners, of which host 3 is one. If it is lost last, all are lost at once.
TEST(StandbyFaults, HaveOneOrderAtATimeAndTheirMemory) {
  Replaced f;
  f.machine.other_kinds[0].hosts = 5;
  f.placement =
      with_owners({{range(0, 128), {{1, -1}, {3, -1}}}, {range(128, 256), {{2, -1}, {3, -1}}}});
  FaultOptions options = {.n_faults = 3, .mean_interval_seconds = 1e-3, .restart_seconds = 1000};
  const auto ends_with_host_3 = [&] {
    const std::vector<SimulatedFault> faults = f.run(options).faults;
    return faults[2].host == 3 && faults[2].at < 3;
  };
  while (!ends_with_host_3()) ASSERT_LT(++options.seed, 100u);
  EXPECT_EQ(f.run(options).n_lost, 4);
  options.standbys = {4, 5};
  const FaultRun two = f.run(options);
  EXPECT_EQ(two.n_lost, 0);
  EXPECT_NEAR(two.longest_gap_seconds, 1 + f.load(), 3) << "both load at the same time";
  // One standby loads one after the other, and the answers that wait for the second are lost.
  options.standbys = {4};
  EXPECT_EQ(f.run(options).n_lost, 4);
  options.patience_seconds = 2 * f.load();
  const FaultRun patient = f.run(options);
  EXPECT_EQ(patient.n_lost, 0);
  EXPECT_NEAR(patient.longest_gap_seconds, 2 * (1 + f.load()), 3);
  // Without room for two shards the second one is refused.
  f.machine.other_kinds[0].nodes[0].memory_bytes = 128 * expert_bytes() * 3 / 2;
  EXPECT_EQ(f.run(options).n_lost, 4);
}

}  // namespace
}  // namespace tandem
