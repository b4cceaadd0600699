// Machines with hosts of several kinds: who has the backbone and who the experts, what requests to
// workers cost, from which batch on they pay, and what faults do to them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>

#include "model/cost.h"
#include "offload/plan/candidates.h"
#include "offload/plan/layer_time.h"
#include "offload/plan/placement_json.h"
#include "offload/plan/roles.h"
#include "offload/simulation/worker_faults.h"
#include "tests/planner_cases.h"

namespace tandem {
namespace {

const WeightFormat kInFp8 = {DType::kF8E4M3};

TEST(MachineKinds, HostsAreNumberedKindByKind) {
  const Machine m = round_kinds(3);
  EXPECT_EQ(m.n_hosts(), 4);
  EXPECT_EQ(m.kind_of(0), 0);
  for (const int host : {1, 2, 3}) EXPECT_EQ(m.kind_of(host), 1) << host;
  EXPECT_EQ(m.first_host_of(1), 1);
  EXPECT_EQ(m.host(2).label, "memory box");
  EXPECT_EQ(m.n_all_gpus(), 1);
  EXPECT_EQ(m.link(1, 3).bytes_per_second, 40e9);
  EXPECT_EQ(m.link(0, 3).bytes_per_second, 10e9);
  Machine pair = round_kinds(2);
  pair.hosts = 2;
  EXPECT_EQ(pair.kind_of(1), 0);
  EXPECT_EQ(pair.first_host_of(1), 2);
  EXPECT_EQ(pair.n_all_gpus(), 2);
}

TEST(MachineKinds, EveryDeviceHasTheMemoryOfItsKind) {
  Machine m = round_kinds(2);
  m.other_kinds[0].nodes[0].memory_bytes = 300'000'000'000;
  const ModelConfig r1 = known_model("r1");
  const Placement p =
      with_owners({{range(0, 100), {{0, -1}}}, {range(100, 256), {{1, -1}, {2, -1}}}});
  const std::vector<DeviceMemory> memory = memory_by_device(r1, m, p);
  ASSERT_EQ(memory.size(), 4u);
  EXPECT_EQ(memory[0].capacity_bytes, 1'000'000'000'000);
  EXPECT_EQ(memory[1].device, (DeviceId{0, 0}));
  EXPECT_EQ(memory[2].device, (DeviceId{1, -1}));
  EXPECT_EQ(memory[3].capacity_bytes, 300'000'000'000);
  EXPECT_EQ(memory[2].weights_bytes, 58 * 156 * routed_expert_bytes(r1, kInFp8));
  EXPECT_TRUE(says(error_of([&] {
                     check_placement(r1, m, with_owners({{range(0, 256), {{1, 0}}}}));
                   }),
                   "host1.gpu0"))
      << "only hosts of the first kind have GPUs";
}

// 8 tokens of one replica; workers have 64 and 192 of 256 experts.
TEST(Roles, ARoundTripByHand) {
  Machine m = round_kinds(2);
  m.request_seconds = 30e-6;
  const ModelConfig r1 = known_model("r1");
  const RoutingStatistics routing(r1);
  const Workload w;
  const PlanInput in = {r1, m, w, routing};
  const Placement p = with_owners({{range(0, 64), {{1, -1}}}, {range(64, 256), {{2, -1}}}});
  EXPECT_EQ(worker_hosts(p), (std::vector{1, 2}));
  const LayerTime t = LayerModel(in, p, {8, 1024, false, 1}).layer(p.stages[0], 3, &p.layers[0]);
  const double uses_first = 1 - std::pow(0.75, 8), uses_second = 1 - std::pow(0.25, 8);
  const double rows = 8 * (uses_first + uses_second);
  const double hand_off = 2 * 10e-6 + 2 * 8 * 7168 * 2 / 10e9;
  EXPECT_NEAR(t[Part::kExchange],
              2 * 5e-6 + rows * 7168 * (2 + 4) / 10e9 + 30e-6 * 3 / 2 + hand_off, 1e-12);
  // The experts of the second worker take longest, at the memory's speed of its kind.
  const double used = 192 * (1 - std::pow(1 - 8.0 / 256, 8));
  const double of_expert = static_cast<double>(routed_expert_bytes(r1, kInFp8));
  EXPECT_GT(t[Part::kCpuExperts], used * of_expert / 200e9 / 2);
  EXPECT_NEAR(t.seconds,
              t[Part::kProjections] + t[Part::kAttention] + t[Part::kRouter] + t[Part::kOverhead] +
                  std::max(t[Part::kShared], t[Part::kExchange] + t[Part::kCpuExperts]),
              1e-12);
  // Two replicas on hosts of their own: workers send and receive the rows of both.
  m.hosts = 2;
  Placement two = with_owners({{range(0, 64), {{2, -1}}}, {range(64, 256), {{3, -1}}}});
  two.stages[0].devices = {{0, 0}, {1, 0}};
  const double of_two = LayerModel(in, two, {8, 1024, false, 2})
                            .layer(two.stages[0], 3, &two.layers[0])[Part::kExchange];
  EXPECT_NEAR(of_two, 2 * 5e-6 + 2 * 8 * uses_second * 7168 * 6 / 10e9 + 30e-6 * 3 / 2 + hand_off,
              1e-12);
}

TEST(Roles, HostsBesideTheBackboneAreNoWorkers) {
  EXPECT_TRUE(worker_hosts(r1_with_experts_on_the_cpu()).empty());
  Placement ranks = with_owners({{range(0, 128), {{0, -1}}}, {range(128, 256), {{1, -1}}}});
  ranks.stages[0].devices = {{0, -1}, {1, -1}};
  EXPECT_TRUE(worker_hosts(ranks).empty());
}

// A pipeline's later stage is a part of the backbone too, whatever layers its host has experts of.
TEST(Roles, HostsOfAnyStageAreNoWorkers) {
  Machine m = round_kinds(2);
  m.hosts = 2;
  Placement p = with_owners({{range(0, 256), {{1, -1}}}});
  p.stages = {{0, 30, {{0, 0}}, 1}, {31, 60, {{1, 0}}, 1}};
  EXPECT_TRUE(worker_hosts(p).empty());
  const Planned planned("r1", m);
  const PlanInput in = {planned.config, planned.machine, planned.request.workload, planned.routing};
  EXPECT_FALSE(roles_of(planned.request, p, predict(in, p)));
}

TEST(Roles, ThePlanGivesEveryHostWhatItIsGoodFor) {
  Workload w;
  w.concurrency = 4;
  const Planned planned("r1", known_machine("office-4090-3x256gb"), w);
  const Plan plan = planned.plan();
  const Placement& p = plan.placement;
  EXPECT_EQ(p.stages[0].devices, (std::vector<DeviceId>{{0, 0}}));
  std::map<int, std::set<int>> experts;  // by host
  for (const LayerExperts& l : p.layers)
    for (const ExpertGroup& group : l.groups)
      for (const DeviceId d : group.owners)
        if (d.is_cpu()) experts[d.host].insert(group.experts.begin(), group.experts.end());
  for (const int host : {1, 2, 3}) {
    ASSERT_GE(experts[host].size(), 65u) << host;
    EXPECT_EQ(*experts[host].rbegin() - *experts[host].begin() + 1,
              static_cast<int>(experts[host].size()))
        << "one range for all layers";
  }
  // All CPUs end together: 65 and 164 GB/s.
  const double ratio = static_cast<double>(experts[0].size()) / experts[1].size();
  EXPECT_NEAR(ratio, 65 / 163.84, 0.08);
  ASSERT_EQ(plan.commands.size(), 4u);
  EXPECT_TRUE(says(plan.commands[0], "host1: tandem worker r1 --experts "));
  EXPECT_TRUE(says(plan.commands[0], "--listen host1:9000"));
  EXPECT_TRUE(says(plan.commands[3],
                   "host0: tandem serve r1 --workers host1:9000,host2:9000,host3:9000 --device "
                   "cuda --ctx 8192"));
  const auto reason = [&](const std::string& text) {
    return std::any_of(plan.reasons.begin(), plan.reasons.end(),
                       [&](const std::string& r) { return r.find(text) != std::string::npos; });
  };
  EXPECT_TRUE(reason("host0 (GPU box) has the backbone; host1 (memory box) is a worker with"));
  EXPECT_TRUE(reason("without workers the model does not fit the backbone's host"));
}

// The backbone may be on hosts of any kind, whatever their order in the file.
TEST(Roles, TheOrderOfKindsDoesNotMatter) {
  const Machine m = known_machine("office-4090-3x256gb");
  Machine turned = m;
  static_cast<HostKind&>(turned) = m.other_kinds[0];
  turned.other_kinds = {static_cast<const HostKind&>(m)};
  const Plan a = Planned("r1", m).plan(), b = Planned("r1", turned).plan();
  EXPECT_EQ(b.placement.stages[0].devices, (std::vector<DeviceId>{{3, 0}}));
  EXPECT_NEAR(b.prediction.score, a.prediction.score, 0.01 * a.prediction.score)
      << "the range that hot experts shorten is another one";
}

TEST(Roles, MoreOfAnythingIsNotSlower) {
  for (const char* model : {"r1", "v2-lite", "k2"}) {
    const auto score = [&](const std::function<void(Machine&)>& change) {
      Machine m = known_machine("office-4090-3x256gb");
      if (change) change(m);
      Workload w;
      w.concurrency = 8;
      w.experts = kNarrowest;
      return Planned(model, m, w).plan().prediction.score;
    };
    const double before = score({});
    EXPECT_LE(score([](Machine& m) { m.between_kinds.bytes_per_second *= 2; }), before);
    EXPECT_LE(score([](Machine& m) { m.request_seconds = 10e-6; }), before);
    EXPECT_LE(score([](Machine& m) { m.other_kinds[0].hosts += 1; }), before * 1.0001);
    EXPECT_LE(score([](Machine& m) { m.other_kinds[0].nodes[0].read_bytes_per_second *= 1.5; }),
              before);
  }
}

// With requests that cost nothing workers pay at once; the dearer they are, the larger the batch.
TEST(Roles, SaysFromWhichBatchOnWorkersPay) {
  const auto pays = [](double request_seconds) {
    Machine m = round_kinds(2);
    m.request_seconds = request_seconds;
    Workload w;
    w.concurrency = 4;
    w.experts = kInFp8;
    const Planned planned("r1", m, w);
    const Placement p = with_owners({{range(0, 128), {{1, -1}}}, {range(128, 256), {{2, -1}}}});
    const PlanInput in = {planned.config, planned.machine, w, planned.routing};
    const auto roles = roles_of(planned.request, p, predict(in, p));
    EXPECT_TRUE(roles && roles->alone) << "1 TB holds all experts";
    // What it says is so.
    Machine alone = m;
    alone.other_kinds.clear();
    const Planned of_one("r1", alone, w);
    const Placement best = of_one.plan().placement;
    const auto seconds = [](const Planned& of, const Placement& placement, int n) {
      Workload some = of.request.workload;
      some.concurrency = n;
      return predict({of.config, of.machine, some, of.routing}, placement).decode.step_seconds;
    };
    const int from = roles->pays_from;
    if (from > 0) {
      EXPECT_LT(seconds(planned, p, from), seconds(of_one, best, from));
      if (from > 1) {
        EXPECT_GE(seconds(planned, p, from / 2), seconds(of_one, best, from / 2));
      }
    }
    return from;
  };
  EXPECT_EQ(pays(1e-9), 1);
  const int dearer = pays(5e-3), dearest = pays(20e-3);
  EXPECT_GT(dearer, 1);
  EXPECT_GT(dearest, dearer);
}

TEST(Roles, SizesWorkersByTheRoundTrip) {
  const auto most = [](double request_seconds) {
    Machine m = round_kinds(2);
    m.request_seconds = request_seconds;
    Workload w;
    w.experts = kInFp8;
    const Planned planned("r1", m, w);
    const Placement p = with_owners({{range(0, 128), {{1, -1}}}, {range(128, 256), {{2, -1}}}});
    const PlanInput in = {planned.config, planned.machine, w, planned.routing};
    const Roles roles = *roles_of(planned.request, p, predict(in, p));
    EXPECT_NEAR(roles.one_expert_seconds, 44.04e6 / 200e9, 1e-7) << "257-way: one expert each";
    return roles.most_workers;
  };
  const int cheap = most(1e-6), dear = most(100e-6);
  EXPECT_GT(dear, 1);
  EXPECT_TRUE(cheap == 0 || cheap > dear) << cheap << " " << dear;
}

TEST(Roles, NumaColumnsAreOfEachKind) {
  Machine m = round_kinds(1);
  HostKind& memory = m.other_kinds[0];
  memory.nodes.push_back(memory.nodes[0]);
  memory.cross_read_bytes_per_second = 50e9;
  const ModelConfig r1 = known_model("r1");
  EXPECT_EQ(numa_slices_of_kinds(r1, m), (NumaColumns{{}, {1024, 1024}}));
  Placement p = with_owners({{range(0, 256), {{1, -1}}}});
  p.numa_columns = {{}, {1024, 1024}};
  check_placement(r1, m, p);
  EXPECT_EQ(rates_of(m, {1, -1}, p.numa_columns).read_bytes_per_second, 400e9);
  EXPECT_EQ(rates_of(m, {0, -1}, p.numa_columns).read_bytes_per_second, 100e9);
  const auto json = placement_to_json(p);
  EXPECT_EQ(placement_from_json(json.dump(), "p").numa_columns, p.numa_columns);
  p.numa_columns = {{1024, 1024}, {}};
  EXPECT_TRUE(says(error_of([&] { check_placement(r1, m, p); }), "GPU box has 1 NUMA nodes"));
  p.numa_columns = {{1024, 1024}};
  EXPECT_TRUE(says(error_of([&] { check_placement(r1, m, p); }), "1 kind(s) of hosts"));
}

// Decode steps with one of two owners of each expert, which fail.
struct Faulty {
  explicit Faulty(bool replicas) {
    std::vector<DeviceId> first = {{1, -1}}, second = {{2, -1}};
    if (replicas) first.push_back({2, -1}), second.push_back({1, -1});
    std::sort(second.begin(), second.end());
    placement = with_owners({{range(0, 128), first}, {range(128, 256), second}});
    workload.concurrency = 4;
  }
  FaultRun run(FaultOptions options) const {
    return simulate_faults({config, machine, workload, routing}, placement, options);
  }
  double step() const {
    return predict({config, machine, workload, routing}, placement).decode.step_seconds;
  }
  ModelConfig config = known_model("r1");
  Machine machine = round_kinds(2);
  RoutingStatistics routing{config};
  Workload workload;
  Placement placement;
};

TEST(WorkerFaults, OtherOwnersGoOn) {
  const Faulty f(true);
  const FaultOptions options = {.n_faults = 30, .mean_interval_seconds = 400};
  const FaultRun run = f.run(options);
  ASSERT_EQ(run.faults.size(), 30u);
  EXPECT_NEAR(run.without_faults, 4 / f.step(), 1e-9);
  EXPECT_LT(run.tokens_per_second, run.without_faults);
  EXPECT_GT(run.tokens_per_second, 0.4 * run.without_faults) << "one of two is left";
  std::set<WorkerFault> kinds;
  int n_alone = 0, n_without = 0;  // faults that left one owner, or none
  for (const SimulatedFault& fault : run.faults) {
    kinds.insert(fault.fault);
    EXPECT_TRUE(fault.host == 1 || fault.host == 2);
    // 58 layers of 256 experts from a disk of 5 GB/s, after 5 s, or 60 s more.
    const double load = 58 * 256 * 44.05e6 / 5e9;
    const double down = fault.fault == WorkerFault::kHung ? 65 : 5;
    EXPECT_NEAR(fault.back_at - fault.at, down + load, 1);
    ++(fault.step_seconds > 0 ? n_alone : n_without);
  }
  EXPECT_GT(n_alone, 15);
  EXPECT_GT(n_without, 0) << "both fail sometimes";
  EXPECT_LE(run.n_lost, 4 * n_without);
  EXPECT_GT(run.n_lost, 0);
  EXPECT_EQ(kinds.size(), 3u);
  const double sum =
      std::accumulate(run.tokens_each_second.begin(), run.tokens_each_second.end(), 0.0);
  EXPECT_NEAR(sum / run.seconds, run.tokens_per_second, 1e-6);
  EXPECT_EQ(f.run(options).tokens_each_second, run.tokens_each_second) << "the seed decides";
}

TEST(WorkerFaults, AHangCostsTheDeadline) {
  const Faulty f(true);
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    const FaultRun run = f.run({.n_faults = 1, .deadline_seconds = 7, .seed = seed});
    const double steps = f.step() + 2 * run.faults[0].step_seconds;
    const double wait = run.faults[0].fault == WorkerFault::kHung ? 7 : 0;
    EXPECT_GE(run.longest_gap_seconds, wait);
    EXPECT_LE(run.longest_gap_seconds, wait + steps);
  }
}

TEST(WorkerFaults, WithoutAnotherOwnerThePatienceDecides) {
  const Faulty f(false);
  const FaultRun patient = f.run({.n_faults = 1, .patience_seconds = 1000});
  const SimulatedFault& fault = patient.faults[0];
  EXPECT_EQ(fault.step_seconds, 0);
  EXPECT_EQ(patient.n_lost, 0);
  EXPECT_NEAR(patient.longest_gap_seconds, fault.back_at - fault.at, 3 * f.step());
  const FaultRun impatient = f.run({.n_faults = 1, .patience_seconds = 10});
  EXPECT_EQ(impatient.n_lost, 4) << "all answers of the step";
  EXPECT_LE(impatient.longest_gap_seconds, 2 * f.step()) << "lost answers have no gaps";
  EXPECT_GE(impatient.seconds, fault.back_at) << "it goes on when the worker is back";
}

TEST(WorkerFaults, RefusesWhatCannotBeSimulated) {
  Faulty f(true);
  EXPECT_TRUE(says(error_of([&] { f.run({.n_faults = -1}); }), "-1 faults: must be 1 to 10000"));
  EXPECT_TRUE(says(error_of([&] { f.run({.mean_interval_seconds = 0}); }), "a fault every 0 s"));
  f.placement = r1_with_experts_on_the_cpu();
  EXPECT_TRUE(says(error_of([&] { f.run({}); }), "this placement has none"));
}

}  // namespace
}  // namespace tandem
