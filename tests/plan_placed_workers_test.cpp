// Placements with workers: what each process has of one, which is what the commands of the plan
// say, and what is refused.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>

#include "model/cost.h"
#include "offload/parts/executed_parts.h"
#include "offload/parts/placed_workers.h"
#include "offload/plan/placement_json.h"
#include "offload/plan/roles.h"
#include "tests/planner_cases.h"

namespace tandem {
namespace {

// The value after an option of a command; empty if it has none.
std::string value_of(const std::string& command, const std::string& option) {
  const size_t at = command.find(" " + option + " ");
  if (at == std::string::npos) return {};
  const size_t begin = at + option.size() + 2;
  return command.substr(begin, command.find(' ', begin) - begin);
}

bool is_owner(const ExpertGroup& group, DeviceId device) {
  return std::find(group.owners.begin(), group.owners.end(), device) != group.owners.end();
}

Placement read_again(const Placement& p) {
  return placement_from_json(placement_to_json(p).dump(), "p.json");
}

// Uses of R1's experts that differ between experts and layers: 8 of a token together.
std::string uneven_statistics(const ModelConfig& r1) {
  const auto uses_of = [](int rank) { return 1 + 600 / (4 + rank); };
  int sum = 0;
  for (int rank = 0; rank < 256; ++rank) sum += uses_of(rank);
  const int missing = (8 - sum % 8) % 8;
  nlohmann::json counts = nlohmann::json::array();
  for (int l = 3; l < r1.n_layers; ++l) {
    std::vector<int> uses(256);
    for (int e = 0; e < 256; ++e) uses[e] = uses_of((e * 37 + l * 11) % 256);
    uses[0] += missing;
    counts.push_back(uses);
  }
  return nlohmann::json{
      {"layers", 61}, {"experts", 256}, {"tokens", (sum + missing) / 8}, {"counts", counts}}
      .dump();
}

// The processes of a placement have what the commands without it say, and the backbone has the
// rest: in each layer exactly what the placement's groups give to its CPU and its GPU.
void expect_commands_and_placement_agree(const PlanRequest& request) {
  const Plan plan = tandem::plan(request);
  PlanRequest with_file = request;
  with_file.placement_file = "p.json";
  const std::vector<std::string> commands = tandem::plan(with_file).commands;
  ASSERT_EQ(commands.size(), plan.commands.size());
  const Placement p = read_again(plan.placement);
  const std::vector<DeviceId> workers = worker_devices(p);
  ASSERT_EQ(commands.size(), workers.size() + 1);
  std::set<int> on_workers;
  for (size_t w = 0; w < workers.size(); ++w) {
    const std::string &with = commands[w], &without = plan.commands[w];
    EXPECT_EQ(value_of(with, "--placement"), "p.json");
    for (const char* option : {"--experts", "--device", "--format"})
      EXPECT_EQ(value_of(with, option), "") << with;
    EXPECT_EQ(value_of(with, "--listen"), value_of(without, "--listen"));
    ASSERT_EQ(worker_called(p, value_of(with, "--host"), "none"), workers[w]) << with;
    const PlacedWorker placed = placed_worker(request.config, p, workers[w]);
    EXPECT_EQ(ranges_text(placed.experts), value_of(without, "--experts"));
    EXPECT_EQ(placed.device.is_cpu() ? "" : "cuda", value_of(without, "--device"));
    EXPECT_EQ(placed.format ? format_name(*placed.format) : "", value_of(without, "--format"));
    EXPECT_EQ(placed.max_rows, p.prefill_chunk_tokens);
    on_workers.insert(placed.experts.begin(), placed.experts.end());
  }
  EXPECT_EQ(value_of(commands.back(), "--placement"), "p.json");
  EXPECT_EQ(value_of(commands.back(), "--workers"), value_of(plan.commands.back(), "--workers"));
  EXPECT_EQ(value_of(commands.back(), "--experts"), "");

  const DeviceId backbone = p.stages[0].devices[0], cpu = {backbone.host, -1};
  const Machine here = hosts_alone(request.machine, request.machine.kind_of(backbone.host), 1);
  const ExecutedParts parts = executed_parts(request.config, here, p);
  EXPECT_EQ(parts.gpu.has_value(), !backbone.is_cpu());
  EXPECT_EQ(parts.kv_tokens, p.kv_tokens);
  EXPECT_EQ(parts.experts.elsewhere().backbone, !backbone.is_cpu());
  for (int l = 0; l < request.config.n_layers; ++l) {
    if (!request.config.is_moe(l)) continue;
    for (const ExpertGroup& group : experts_of_layer(p, l)->groups)
      for (const int e : group.experts) {
        const bool on_gpu = !backbone.is_cpu() && is_owner(group, backbone);
        const bool in_memory = !on_gpu && on_workers.count(e) == 0;
        EXPECT_TRUE(!in_memory || is_owner(group, cpu)) << l << " " << e;
        EXPECT_EQ(parts.gpu && parts.gpu->experts[l][e], on_gpu) << l << " " << e;
        EXPECT_EQ(parts.experts.elsewhere().experts[l][e], !in_memory) << l << " " << e;
      }
  }
}

TEST(PlacedWorkers, HaveWhatTheirCommandsSay) {
  Workload w;
  w.concurrency = 4;
  expect_commands_and_placement_agree(
      Planned("r1", known_machine("office-4090-3x256gb"), w).request);
}

// The second kind of hosts has the backbone, whose number is that of its first host.
TEST(PlacedWorkers, OfAnyKindOfHosts) {
  const Machine m = known_machine("office-4090-3x256gb");
  Machine turned = m;
  static_cast<HostKind&>(turned) = m.other_kinds[0];
  turned.other_kinds = {static_cast<const HostKind&>(m)};
  expect_commands_and_placement_agree(Planned("r1", turned).request);
}

TEST(PlacedWorkers, InAnotherFormatWithReplicas) {
  Workload w;
  w.concurrency = 4;
  w.experts = WeightFormat{DType::kI8};
  w.redundant_experts = 20;
  Machine m = known_machine("office-4090-3x256gb");
  m.gpus.clear();                            // one would keep experts as stored
  m.other_kinds[0].network = {0.2e9, 5e-3};  // too slow for several parts of a backbone
  expect_commands_and_placement_agree(Planned("r1", m, w).request);
}

// Each layer has other experts on the backbone's GPU, and workers the same ones of every layer.
TEST(PlacedWorkers, BesideAGpuWithOtherExpertsOfEachLayer) {
  Machine m = known_machine("office-4090-3x256gb");
  m.gpus[0].memory_bytes = 96'000'000'000;
  Planned planned("r1", m);
  const RoutingStatistics routing(planned.config, uneven_statistics(planned.config), "s.json");
  const PlanRequest request = {"r1", planned.config, planned.machine, {}, routing};
  EXPECT_GT(tandem::plan(request).placement.layers.size(), 10u);
  expect_commands_and_placement_agree(request);
}

TEST(PlacedWorkers, OnGpus) {
  Machine m = round_kinds(2);
  HostKind& boxes = m.other_kinds[0];
  Gpu gpu = m.gpus[0];
  gpu.memory_bytes = 200'000'000'000;
  boxes.gpus.assign(2, gpu);
  boxes.nodes[0] = {8, 64'000'000'000, 20e9};
  m.nodes[0] = {8, 64'000'000'000, 20e9};
  Workload w;
  w.concurrency = 4;
  const Planned planned("r1", m, w);
  expect_commands_and_placement_agree(planned.request);
  PlanRequest request = planned.request;
  request.placement_file = "p.json";
  EXPECT_EQ(tandem::plan(request).commands[1],
            "host1: CUDA_VISIBLE_DEVICES=1 tandem worker r1 --placement p.json --host host1.gpu1 "
            "--listen host1:9001 --worker-secret KEY");
}

// What the program refuses is started without the file.
TEST(PlacedWorkers, CommandsDoNotNameWhatIsRefused) {
  Workload w;
  w.experts = WeightFormat{DType::kI4TwoLevel, 64};
  const Planned planned("r1", known_machine("office-4090-3x256gb"), w);
  PlanRequest request = planned.request;
  request.placement_file = "p.json";
  Placement placement = tandem::plan(request).placement;
  const Machine here = hosts_alone(planned.machine, 0, 1);
  const auto refusal = [&] {
    return error_of([&] { executed_parts(planned.config, here, placement); });
  };
  ASSERT_EQ(refusal(), "no error");
  for (LayerExperts& l : placement.layers)
    for (ExpertGroup& group : l.groups) group.format = *w.experts;
  ASSERT_TRUE(says(refusal(), "on a GPU, which keeps experts as stored"));
  const Plan plan = assess(request, placement);
  EXPECT_EQ(value_of(plan.commands.back(), "--placement"), "");
  EXPECT_EQ(value_of(plan.commands.back(), "--experts"), "int4");
  EXPECT_NE(value_of(plan.commands[0], "--experts"), "");
}

// Also where an edited placement is refused for its experts, and steps have more rows than
// standbys take by default.
TEST(PlacedWorkers, CommandsOfEditedPlacements) {
  Workload w;
  w.concurrency = 4;
  const Planned planned("r1", known_machine("office-4090-3x256gb"), w);
  PlanRequest request = planned.request;
  request.placement_file = "p.json";
  request.why_not_run = [&](const Placement& p) { return why_not_run(planned.config, p); };
  request.n_standbys = 1;
  const Plan plan = tandem::plan(request);
  EXPECT_EQ(why_not_run(planned.config, plan.placement), "");
  EXPECT_EQ(value_of(plan.commands.back(), "--placement"), "p.json");
  bool any = false;
  for (const std::string& command : plan.commands) {
    if (value_of(command, "--experts") != "standby") continue;
    EXPECT_EQ(value_of(command, "--chunk"), std::to_string(plan.placement.prefill_chunk_tokens));
    any = true;
  }
  EXPECT_TRUE(any);

  Placement edited = plan.placement;
  LayerExperts last = edited.layers.back();
  edited.layers.back().last = 40;
  last.first = 41;
  const auto is_on_worker = [&](const ExpertGroup& group) {
    return !group.experts.empty() && !has_backbone(edited, group.owners[0].host);
  };
  const auto from = std::find_if(last.groups.begin(), last.groups.end(), is_on_worker);
  ASSERT_NE(from, last.groups.end());
  const auto to = std::find_if(last.groups.begin(), last.groups.end(), [&](const auto& group) {
    return is_on_worker(group) && group.owners != from->owners;
  });
  ASSERT_NE(to, last.groups.end());
  to->experts.push_back(from->experts.back());
  std::sort(to->experts.begin(), to->experts.end());
  from->experts.pop_back();
  edited.layers.push_back(last);
  request.n_standbys = 0;
  const Plan assessed = assess(request, edited);
  const auto says_why = [](const std::string& reason) {
    return says(reason, "not executed: ") && says(reason, "the same experts of every layer");
  };
  EXPECT_TRUE(std::any_of(assessed.reasons.begin(), assessed.reasons.end(), says_why));
  EXPECT_EQ(value_of(assessed.commands.back(), "--placement"), "");
}

// R1: the backbone's GPU has experts 0-1 of the first layers, its CPU the next ones, and three
// workers the others.
class OneBackbone : public ::testing::Test {
 protected:
  OneBackbone() {
    p_ = with_owners({{range(0, 2), {{2, 0}}},
                      {range(2, 64), {{2, -1}}},
                      {range(64, 128), {{0, -1}}},
                      {range(128, 192), {{1, 0}, {1, 1}}},
                      {range(192, 256), {{1, 1}}}});
    p_.stages[0].devices = {{2, 0}};
    p_.layers[0].last = 30;
    LayerExperts others = p_.layers[0];
    others.first = 31;
    others.last = 60;
    others.groups[0].experts = {};
    others.groups.erase(others.groups.begin());
    others.groups[1].experts.insert(others.groups[1].experts.begin(), {0, 1});
    p_.layers.push_back(others);
    here_.nodes[0].memory_bytes = 400'000'000'000;
  }
  std::string refusal() const {
    return error_of([&] { executed_parts(r1_, here_, read_again(p_)); });
  }
  std::string refusal_of(DeviceId worker) const {
    return error_of([&] { placed_worker(r1_, read_again(p_), worker); });
  }
  std::vector<ExpertGroup>& groups() { return p_.layers[1].groups; }

  const ModelConfig r1_ = known_model("r1");
  Machine here_ = round_machine();
  Placement p_;
};

TEST_F(OneBackbone, KeepsItsOwnExpertsOfEachLayer) {
  p_.micro_batches = 2;
  p_.stream_from_tokens = 512;
  const ExecutedParts parts = executed_parts(r1_, here_, read_again(p_));
  ASSERT_TRUE(parts.gpu);
  EXPECT_EQ(parts.gpu->micro_batches_from_sequences, 0);
  EXPECT_EQ(parts.gpu->stream_from_tokens, 0);
  EXPECT_FALSE(all_on_gpu(*parts.gpu));
  const auto& elsewhere = parts.experts.elsewhere().experts;
  for (const int l : {3, 30, 31, 60})
    for (int e = 0; e < 256; ++e) {
      EXPECT_EQ(parts.gpu->experts[l][e], l <= 30 && e < 2) << l << " " << e;
      EXPECT_EQ(elsewhere[l][e], e < 2 || e >= 64) << l << " " << e;
    }
  const PlacedWorker first = placed_worker(r1_, p_, {0, -1});
  EXPECT_EQ(ranges_text(first.experts), "0-1,64-127") << "also where the GPU has 0-1";
  EXPECT_EQ(ranges_text(placed_worker(r1_, p_, {1, 1}).experts), "128-255");
}

TEST_F(OneBackbone, FollowsTheColumnsOfItsKind) {
  here_.nodes.push_back(here_.nodes[0]);
  here_.cross_read_bytes_per_second = 50e9;
  p_.numa_columns = {{2048}, {1152, 896}};
  EXPECT_TRUE(says(refusal(), "numa_columns are of 2 kinds of hosts, and hosts_of_kinds has 0"));
  p_.hosts_of_kinds = {2, 1};
  EXPECT_EQ(executed_parts(r1_, here_, read_again(p_)).experts.node_columns(),
            (std::vector{1152, 896}));
  EXPECT_EQ(refusal_of({0, -1}), "no error");
  p_.hosts_of_kinds = {1, 1};
  EXPECT_TRUE(says(refusal(), "host2 has a part of the model, and the kinds of hosts_of_kinds"));
  p_.hosts_of_kinds = {3, 1};
  EXPECT_TRUE(says(refusal(), "numa_columns lists 1 slices and this machine has 2 NUMA nodes"));
}

TEST_F(OneBackbone, WorkersAreCalledByHostOrDevice) {
  EXPECT_EQ(worker_called(p_, "host0", "host1"), (DeviceId{0, -1}));
  EXPECT_EQ(worker_called(p_, "", "host0"), (DeviceId{0, -1}));
  EXPECT_EQ(worker_called(p_, "host0.cpu", ""), (DeviceId{0, -1}));
  EXPECT_EQ(worker_called(p_, "host1.gpu1", "host0"), (DeviceId{1, 1}));
  const auto said = [&](const std::string& name, const std::string& host) {
    return error_of([&] { worker_called(p_, name, host); });
  };
  EXPECT_EQ(said("host1", ""),
            "--host host1: the placement has the workers host1.gpu0, host1.gpu1 there: name one "
            "with --host");
  for (const char* none : {"host2", "host1.cpu", "host1.gpu2", "1", "host10"})
    EXPECT_TRUE(says(said(none, "host0"),
                     "the placement has the workers host0.cpu, host1.gpu0, host1.gpu1: name one"))
        << none;
  EXPECT_TRUE(says(said("", "box"), "this host is called box: the placement has the workers"));
  EXPECT_TRUE(says(error_of([&] { worker_called(r1_with_experts_on_the_cpu(), "", "host0"); }),
                   "the placement has no workers"));
}

TEST_F(OneBackbone, OtherBackbonesAreRefused) {
  p_.stages[0].devices = {{2, 0}, {2, 1}};
  for (const std::string& said : {refusal(), refusal_of({0, -1})})
    EXPECT_TRUE(says(said,
                     "the backbone is on 2 devices (host2.gpu0, host2.gpu1) and experts are on "
                     "workers (host0.cpu, host1.gpu0, host1.gpu1): with workers this program runs "
                     "the backbone on one device"));
  p_.stages = {{0, 30, {{2, 0}}, 1}, {31, 60, {{3, 0}}, 1}};
  EXPECT_TRUE(says(refusal(), "the backbone is on 2 devices"));
  p_.stages = {{0, 60, {{2, 1}}, 1}};
  EXPECT_TRUE(says(refusal(),
                   "layers 0-60 of the backbone are on host2.gpu1: this program runs "
                   "them on host2.cpu and host2.gpu0 only"));
}

TEST_F(OneBackbone, AWorkerHasTheSameExpertsOfEveryLayer) {
  groups()[0].experts.push_back(64);
  std::erase(groups()[1].experts, 64);
  for (const std::string& said : {refusal(), refusal_of({1, 1})})
    EXPECT_TRUE(says(said,
                     "layer 31: expert 64 is on host2.cpu, and in other layers on host0.cpu: a "
                     "worker has the same experts of every layer, but for those on the backbone's "
                     "GPU"));
}

TEST_F(OneBackbone, AReplicaOfAnotherLayerIsMissing) {
  groups()[2].owners = {{1, 0}};
  EXPECT_TRUE(says(refusal(), "expert 128 is on host1.gpu0, and in other layers on host1.gpu1"));
}

TEST_F(OneBackbone, FormatsThatAWorkerDoesNotKeepAreRefused) {
  groups()[1].format = {DType::kI8};
  EXPECT_TRUE(says(refusal_of({0, -1}),
                   "layer 31: expert 0 on host0.cpu is int8 and others there are fp8"));
  p_.layers[0].groups[2].format = {DType::kI8};
  EXPECT_EQ(placed_worker(r1_, p_, {0, -1}).format, WeightFormat{DType::kI8});
  EXPECT_EQ(placed_worker(r1_, p_, {1, 0}).format, std::nullopt);
  p_.layers[0].groups[3].format = groups()[2].format = {DType::kI8};
  EXPECT_TRUE(says(refusal_of({1, 0}), "the experts on host1.gpu0 are int8: a worker's GPU keeps"));
}

TEST_F(OneBackbone, WhatIsNotSoundIsRefusedEverywhere) {
  const auto everywhere = [&](const std::string& text) {
    for (const std::string& said : {refusal(), refusal_of({0, -1})})
      EXPECT_TRUE(says(said, text)) << said;
  };
  std::erase(groups()[1].experts, 100);
  everywhere("layer 31: expert 100 has no owner");
  groups()[1].experts = range(64, 128);
  everywhere("layer 31: expert 0 has no owner");
  groups()[1].experts = range(63, 128);
  everywhere("layer 31: expert 63 is listed twice");
  groups()[1].sliced = true;
  everywhere("layer 31: expert 63 is sliced among host0.cpu: a worker has whole experts");
  here_.nodes[0].memory_bytes = 10'000'000'000;
  groups()[1] = {range(64, 128), {DType::kF8E4M3}, {{0, -1}}};
  groups()[0].experts = range(0, 64);
  p_.layers[0].groups[0].owners = {{2, -1}};
  EXPECT_TRUE(says(refusal(), "host2.cpu holds 10.00 GB"));
  EXPECT_EQ(refusal_of({0, -1}), "no error") << "a worker does not know that host";
}

TEST_F(OneBackbone, ConnectedWorkersHaveTheOthersExperts) {
  std::vector<bool> connected(256, true);
  const auto said = [&] { return error_of([&] { require_workers_have(p_, connected); }); };
  const auto set = [&](const std::vector<int>& experts, bool value) {
    for (const int e : experts) connected[e] = value;
  };
  EXPECT_TRUE(says(said(), "experts 2-63 are on the backbone's host, and workers of --workers "));
  set(range(2, 64), false);
  EXPECT_EQ(said(), "no error");
  set(range(100, 102), false);
  EXPECT_TRUE(
      says(said(), "experts 100-101 are on host0.cpu, and no worker of --workers has them"));
  set({130, 200}, false);
  EXPECT_TRUE(
      says(said(), "experts 100-101,130,200 are on host0.cpu, host1.gpu0, host1.gpu1, and no"));
  set(range(64, 256), true);
  connected[0] = false;
  EXPECT_TRUE(says(said(), "experts 0 are on host0.cpu")) << "of the layers without it on the GPU";
  set(range(0, 256), true);
  p_.layers.insert(p_.layers.begin(), {0, 2, {{{300}, {DType::kF8E4M3}, {{1, 0}}}}});
  EXPECT_TRUE(says(said(), "experts 300 are on host1.gpu0")) << "of dense layers";
}

// Experts of every layer on the GPU may be on workers too, which are not asked for them.
TEST_F(OneBackbone, ExpertsOfItsGpuMayBeOnWorkersToo) {
  p_.layers.pop_back();
  p_.layers[0].last = 60;
  std::vector<bool> connected(256, true);
  for (const int e : range(2, 64)) connected[e] = false;
  EXPECT_EQ(error_of([&] { require_workers_have(p_, connected); }), "no error");
  connected[0] = connected[1] = false;
  EXPECT_EQ(error_of([&] { require_workers_have(p_, connected); }), "no error");
}

TEST(PlacedWorkersFile, KeepsTheHostsOfKinds) {
  const Plan plan = Planned("r1", known_machine("office-4090-3x256gb")).plan();
  EXPECT_EQ(plan.placement.hosts_of_kinds, (std::vector{1, 3}));
  EXPECT_EQ(read_again(plan.placement).hosts_of_kinds, (std::vector{1, 3}));
  nlohmann::ordered_json text = placement_to_json(plan.placement);
  for (const nlohmann::ordered_json& wrong : {nlohmann::ordered_json{1, 0}, {"1"}, {1.5}}) {
    text["experts"]["hosts_of_kinds"] = wrong;
    EXPECT_TRUE(says(error_of([&] { placement_from_json(text.dump(), "p.json"); }),
                     "p.json: experts: hosts_of_kinds is"));
  }
  const Machine one = known_machine("2x6454s-4090");
  EXPECT_TRUE(Planned("r1", one).plan().placement.hosts_of_kinds.empty());
}

}  // namespace
}  // namespace tandem
