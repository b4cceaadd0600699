// What the loader executes of a placement, and what it refuses.
#include "offload/parts/executed_parts.h"

#include <gtest/gtest.h>

#include <functional>
#include <nlohmann/json.hpp>

#include "model/cost.h"
#include "offload/plan/placement_json.h"
#include "tests/planner_cases.h"

namespace tandem {
namespace {

using Json = nlohmann::json;

// A machine with two NUMA nodes and enough memory for R1.
Machine two_nodes() {
  Machine m = round_machine();
  m.name = "this machine";
  m.gpus.clear();
  m.nodes.push_back(m.nodes[0]);
  m.cross_read_bytes_per_second = 50e9;
  return m;
}

class OnTheCpu : public ::testing::Test {
 protected:
  OnTheCpu() : planned_("r1", two_nodes()) {
    text_ = Json::parse(placement_to_json(planned_.plan().placement).dump());
  }
  Json& layers() { return text_["experts"]["layers"]; }
  Json& group() { return layers()[0]["groups"][0]; }
  ExecutedParts parts() const {
    return executed_parts(planned_.config, planned_.machine,
                          placement_from_json(text_.dump(), "p.json"));
  }
  std::string refusal() const {
    return error_of([&] { parts(); });
  }
  // The refusal after one edit of the placement; the edit is reverted.
  std::string after(const std::function<void()>& edit) {
    const Json sound = text_;
    edit();
    const std::string said = refusal();
    text_ = sound;
    return said;
  }

  Planned planned_;
  Json text_;
};

TEST_F(OnTheCpu, APlanForCpusIsObeyed) {
  text_["kv"]["tokens"] = 5000;
  text_["prefill"]["chunk_tokens"] = 1024;
  text_["experts"]["numa_columns"] = {1152, 896};
  const ExecutedParts p = parts();
  EXPECT_EQ(p.kv_tokens, 5000);
  EXPECT_EQ(p.chunk_tokens, 1024);
  EXPECT_EQ(p.experts.node_columns(), (std::vector<int>{1152, 896}));
  for (int l = 0; l < 61; ++l) EXPECT_FALSE(p.experts.format(l)) << "fp8 as stored";
  EXPECT_TRUE(p.experts.of_layers().empty());
}

TEST_F(OnTheCpu, EveryLayerHasItsFormat) {
  layers() = Json::parse(R"([
      {"layers": "3-9", "groups": [{"experts": "0-255", "format": "int8", "owners": ["host0.cpu"]}]},
      {"layers": "10-60", "groups": [{"experts": "0-99", "format": "int4", "owners": ["host0.cpu"]},
                                {"experts": "100-255", "format": "int4", "owners": ["host0.cpu"]}]}
      ])");
  const ExpertsLayout experts = parts().experts;
  for (int l = 0; l < 61; ++l)
    EXPECT_EQ(*experts.format(l), weight_format(l < 10 ? "int8" : "int4")) << l;
  EXPECT_EQ(experts.conversions(),
            (std::vector<WeightFormat>{weight_format("int8"), weight_format("int4")}));
}

// Three hosts with one rank each.
class OnRanks : public OnTheCpu {
 protected:
  OnRanks() {
    planned_.machine.hosts = 3;
    planned_.machine.network = {10e9, 5e-6};
    text_["backbone"]["stages"][0]["devices"] = {"host0.cpu", "host1.cpu", "host2.cpu"};
    text_["backbone"]["stages"][0]["tp"] = 3;
    layers() = Json::parse(R"([
        {"layers": "3-9", "groups": [{"experts": "0-199", "format": "fp8", "owners": ["host2.cpu"]},
                                {"experts": "200-255", "format": "int8", "owners": ["host0.cpu"]}]},
        {"layers": "10-60", "groups": [{"experts": "0-9", "format": "int4", "owners": ["host1.cpu"]},
                                {"experts": "10-255", "format": "fp8", "owners": ["host0.cpu"]}]}
        ])");
    text_["experts"].erase("numa_columns");
  }
  ExecutedParts parts_of(int rank, int n_ranks = 3) const {
    return executed_parts(planned_.config, planned_.machine,
                          placement_from_json(text_.dump(), "p.json"), {rank, n_ranks});
  }
};

TEST_F(OnRanks, EachRankHasTheExpertsOfItsHost) {
  planned_.config.n_used_mtp_layers = 1;
  const ExecutedParts first = parts_of(0), second = parts_of(1);
  EXPECT_EQ(first.ranks_of_expert, second.ranks_of_expert);
  ASSERT_EQ(first.ranks_of_expert.size(), 62u);
  EXPECT_TRUE(first.ranks_of_expert[2].empty());
  for (int l = 3; l < 62; ++l)
    for (int e = 0; e < 256; ++e)
      EXPECT_EQ(first.ranks_of_expert[l][e],
                std::vector<int>{l < 10 ? (e < 200 ? 2 : 0) : (e < 10 ? 1 : 0)});
  EXPECT_EQ(*first.experts.format(5), weight_format("int8"));
  EXPECT_FALSE(first.experts.format(20)) << "as stored";
  EXPECT_FALSE(second.experts.format(5)) << "none there";
  EXPECT_EQ(*second.experts.format(20), weight_format("int4"));
}

TEST_F(OnRanks, OtherRanksAndHostsAreRefused) {
  EXPECT_TRUE(says(error_of([&] { parts_of(0, 2); }),
                   "host2.cpu: this program runs them on "
                   "host0.cpu to host1.cpu, the CPUs of 2 ranks"));
  planned_.machine.hosts = 4;
  EXPECT_TRUE(says(error_of([&] { parts_of(0, 4); }), "4 ranks have the backbone"));
  planned_.machine.hosts = 3;
}

TEST_F(OnRanks, ReplicasOfExpertsAreOnAllTheirOwners) {
  EXPECT_FALSE(has_replicas(parts_of(0)));
  group()["owners"] = {"host2.cpu", "host1.cpu"};
  for (int rank = 0; rank < 3; ++rank) {
    const ExecutedParts parts = parts_of(rank);
    EXPECT_TRUE(has_replicas(parts));
    EXPECT_EQ(parts.ranks_of_expert[5][0], (std::vector{1, 2}));
    EXPECT_EQ(parts.ranks_of_expert[5][255], std::vector{0});
    EXPECT_EQ(parts.ranks_of_expert[20][0], std::vector{1});
  }
  group()["format"] = "int8";
  for (const int rank : {1, 2}) {
    const auto format = parts_of(rank).experts.format(5);
    ASSERT_TRUE(format.has_value()) << rank;
    EXPECT_EQ(*format, weight_format("int8")) << rank;
  }
}

// One rank has no replicas: the host without the backbone is a worker, which then has them alone.
TEST_F(OnTheCpu, ReplicasNeedRanks) {
  group()["owners"] = {"host0.cpu", "host1.cpu"};
  const Elsewhere elsewhere = parts().experts.elsewhere();
  EXPECT_FALSE(elsewhere.backbone);
  for (int l = 0; l < 61; ++l)
    EXPECT_EQ(elsewhere.experts[l], std::vector<bool>(l < 3 ? 0 : 256, true)) << l;
}

TEST_F(OnRanks, StagesHaveTheirLayersAndExperts) {
  text_["backbone"]["stages"] = Json::parse(R"([
      {"layers": "0-9", "tp": 1, "devices": ["host0.cpu"]},
      {"layers": "10-59", "tp": 1, "devices": ["host1.cpu"]},
      {"layers": "60-60", "tp": 1, "devices": ["host2.cpu"]}])");
  layers() = Json::parse(R"([
      {"layers": "3-9", "groups": [{"experts": "0-255", "format": "int8", "owners": ["host0.cpu"]}]},
      {"layers": "10-59", "groups": [{"experts": "0-255", "format": "int4", "owners": ["host1.cpu"]}]},
      {"layers": "60-60", "groups": [{"experts": "0-255", "format": "fp8", "owners": ["host2.cpu"]}]}
      ])");
  for (int rank = 0; rank < 3; ++rank) {
    const ExecutedParts parts = parts_of(rank);
    EXPECT_EQ(parts.grid.n_stages, 3);
    ASSERT_EQ(parts.stages.size(), 3u);
    EXPECT_EQ(parts.stages[1].first, 10);
    EXPECT_EQ(parts.stages[1].n, 50);
    EXPECT_EQ(parts.ranks_of_expert[20][7], std::vector{0}) << "of its stage";
  }
  EXPECT_EQ(*parts_of(0).experts.format(5), weight_format("int8"));
  EXPECT_EQ(*parts_of(1).experts.format(20), weight_format("int4"));
  text_["backbone"]["stages"][1]["devices"] = {"host1.cpu", "host2.cpu"};
  text_["backbone"]["stages"].erase(2);
  text_["backbone"]["stages"][1]["layers"] = "10-60";
  EXPECT_TRUE(says(error_of([&] { parts_of(0); }), "this program divides all stages alike"));
  text_["backbone"]["stages"] = Json::parse(R"([
      {"layers": "0-9", "tp": 1, "devices": ["host0.cpu"]},
      {"layers": "10-58", "tp": 1, "devices": ["host1.cpu"]},
      {"layers": "59-60", "tp": 1, "devices": ["host2.cpu"]}])");
  EXPECT_TRUE(says(error_of([&] { parts_of(0); }),
                   "layer 59: an expert is on host1.cpu, where the layer's stage of the backbone"));
}

TEST_F(OnRanks, ReplicasOfTheBackboneHaveRanksOfTheirOwn) {
  EXPECT_EQ(parts_of(0).grid.n_replicas, 1);
  EXPECT_EQ(parts_of(0).grid.tp, 3);
  text_["backbone"]["stages"][0]["tp"] = 1;
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(parts_of(rank).grid.n_replicas, 3);
    EXPECT_EQ(parts_of(rank).grid.tp, 1);
    EXPECT_EQ(parts_of(rank).ranks_of_expert[5][0], std::vector{2});
  }
}

// Only hosts whose CPUs, or whose first GPUs, all have all layers can be started as ranks.
TEST(PlacedRanks, AreDevicesThatHaveTheBackbone) {
  const auto n = [](std::vector<DeviceId> devices, int tp, bool one_stage = true) {
    Placement p;
    p.stages.push_back({0, 5, std::move(devices), tp});
    if (!one_stage) p.stages.push_back({6, 9, p.stages[0].devices, tp});
    return n_ranks_of(p);
  };
  const DeviceId a{0, -1}, b{1, -1}, c{2, -1};
  EXPECT_EQ(n({a}, 1), 1);
  EXPECT_EQ(n({a, b}, 2), 2);
  EXPECT_EQ(n({a, b, c}, 3), 3);
  EXPECT_EQ(n({a, b}, 1), 2) << "replicas";
  EXPECT_EQ(n({a, b}, 2, false), 1) << "a pipeline whose stages are on the same devices";
  Placement pipeline;
  pipeline.stages = {{0, 5, {a}, 1}, {6, 9, {b}, 1}};
  EXPECT_EQ(n_ranks_of(pipeline), 2);
  pipeline.stages = {{0, 5, {{0, 0}, {0, 1}}, 2}, {6, 9, {{1, 0}, {1, 1}}, 2}};
  EXPECT_EQ(n_ranks_of(pipeline), 4);
  pipeline.stages = {{0, 5, {b}, 1}, {6, 9, {a}, 1}};
  EXPECT_EQ(n_ranks_of(pipeline), 1) << "not in order";
  EXPECT_EQ(n({b, c}, 2), 2) << "the first host has nothing";
  EXPECT_EQ(n({a, {1, 0}}, 2), 2) << "a GPU after a CPU";
  const DeviceId g0{0, 0}, g1{0, 1}, h0{1, 0}, h1{1, 1};
  EXPECT_EQ(n({g0, g1}, 2), 2);
  EXPECT_EQ(n({g0, g1, h0, h1}, 4), 4);
  EXPECT_EQ(n({g0, h0}, 2), 2);
  EXPECT_EQ(n({g0, g1, h0}, 3), 3);
  EXPECT_EQ(n({g0, h0, g1, h1}, 4), 1) << "not host by host";
  EXPECT_EQ(n({g1, g0}, 2), 1) << "not in order";
  EXPECT_EQ(n({h0, h1}, 2), 2) << "the first host has nothing";
  EXPECT_EQ(n({a, c}, 2), 1) << "not successive hosts";
  EXPECT_EQ(n({g0, b}, 2), 2) << "a CPU after a GPU";
  EXPECT_EQ(n({g0, g1}, 1), 2) << "replicas";
  EXPECT_EQ(n_ranks_of({}), 1);
}

// Two hosts with two GPUs each. Experts of a host's CPU are dealt to its ranks.
TEST(PlacedRanks, HaveTheirGpuAndAPartOfTheirCpu) {
  const ModelConfig c =
      ModelConfig::from_directory(std::string(TANDEM_SOURCE_DIR) + "/models/tiny-r1");
  Machine m = round_machine();
  m.hosts = 2;
  m.gpus.assign(2, m.gpus[0]);
  Placement p;
  p.backbone = stored_format(c);
  p.stages = {{0, c.n_layers - 1, {{0, 0}, {0, 1}, {1, 0}, {1, 1}}, 4}};
  p.kv_tokens = 64;
  const auto group = [&](int first, DeviceId owner) {
    return ExpertGroup{{first, first + 1, first + 2, first + 3}, stored_expert_format(c), {owner}};
  };
  p.layers = {{1, 2, {group(0, {0, -1}), group(4, {1, -1}), group(8, {0, 1}), group(12, {1, 0})}}};
  const ExecutedParts parts = executed_parts(c, m, p, {1, 4, 2});
  const std::vector<int> want = {0, 1, 0, 1, 2, 3, 2, 3, 1, 1, 1, 1, 2, 2, 2, 2};
  for (int e = 0; e < 16; ++e) EXPECT_EQ(parts.ranks_of_expert[1][e], std::vector{want[e]}) << e;
  EXPECT_EQ(parts.ranks_of_expert[2], parts.ranks_of_expert[1]);
  EXPECT_TRUE(parts.ranks_of_expert[0].empty());
  // Replicas on the CPUs of both hosts are dealt to the ranks of each.
  Placement replicas = p;
  replicas.layers[0].groups[0].owners.push_back({1, -1});
  const RanksOfExperts dealt = executed_parts(c, m, replicas, {1, 4, 2}).ranks_of_expert;
  EXPECT_EQ(dealt[1][0], (std::vector{0, 2}));
  EXPECT_EQ(dealt[1][1], (std::vector{1, 3}));
  EXPECT_EQ(dealt[1][2], (std::vector{0, 2}));
  EXPECT_EQ(dealt[1][4], std::vector{2});
  ASSERT_TRUE(parts.gpu);
  for (int e = 0; e < 16; ++e) {
    EXPECT_EQ(parts.gpu->experts[1][e], e >= 8 && e < 12) << e;
    EXPECT_EQ(parts.gpu->on_other_ranks[1][e], want[e] != 1) << e;
    EXPECT_EQ(parts.experts.elsewhere().experts[1][e], e != 1 && e != 3) << e;
  }
  EXPECT_FALSE(all_on_gpu(*parts.gpu));
  EXPECT_FALSE(parts.gpu->expert_columns);

  ExpertGroup all = {{}, stored_expert_format(c), p.stages[0].devices, true};
  for (int e = 0; e < 16; ++e) all.experts.push_back(e);
  Placement sliced = p;
  sliced.layers = {{1, 1, {all}}, {2, 2, p.layers[0].groups}};
  EXPECT_FALSE(error_of([&] { executed_parts(c, m, sliced, {1, 4, 2}); }).empty());
  p.micro_batches = 2;
  EXPECT_TRUE(says(error_of([&] { executed_parts(c, m, p, {1, 4, 2}); }), "set it to 1"));
  p.micro_batches = 1;
  EXPECT_TRUE(says(error_of([&] { executed_parts(c, m, p, {1, 2, 2}); }), "host1.gpu0"));
}

// Replicas divide steps as placed where rows of all experts travel, and each has a head.
TEST(PlacedRanks, OfReplicasDivideStepsAsPlaced) {
  const ModelConfig c =
      ModelConfig::from_directory(std::string(TANDEM_SOURCE_DIR) + "/models/tiny-r1");
  Machine m = round_machine();
  m.gpus.assign(2, m.gpus[0]);
  Placement p;
  p.backbone = stored_format(c);
  p.stages = {{0, c.n_layers - 1, {{0, 0}, {0, 1}}, 1}};
  p.kv_tokens = 64;
  p.layers = {{1,
               2,
               {{range(0, 8), stored_expert_format(c), {{0, 0}}},
                {range(8, 16), stored_expert_format(c), {{0, 1}}}}}};
  EXPECT_EQ(executed_parts(c, m, p, {1, 2, 2}).micro_batches, 0) << "as is measured";
  p.micro_batches = 2;
  EXPECT_EQ(executed_parts(c, m, p, {1, 2, 2}).micro_batches, 2);
  EXPECT_EQ(executed_parts(c, m, p, {1, 2, 2}).rows, ExpertRows::kExact);
  p.expert_rows = ExpertRows::kFp8;
  EXPECT_EQ(executed_parts(c, m, p, {1, 2, 2}).rows, ExpertRows::kFp8);
  EXPECT_EQ(why_not_executed(c, m, p), "");
  EXPECT_FALSE(executed_parts(c, m, p, {1, 2, 2}).by_replicas.any());
  p.head_replicated = false;
  EXPECT_EQ(executed_parts(c, m, p, {1, 2, 2}).by_replicas, (SharedByReplicas{.head = true}));
  p.dense_replicated = false;
  EXPECT_EQ(executed_parts(c, m, p, {1, 2, 2}).by_replicas,
            (SharedByReplicas{.dense = true, .head = true}));
  EXPECT_EQ(why_not_executed(c, m, p), "");
  p.head_replicated = p.dense_replicated = true;
  p.layers[0].groups[1].owners = {{0, -1}};
  EXPECT_TRUE(says(why_not_executed(c, m, p), "set it to 1")) << "some experts are on the CPU";
  p.micro_batches = 1;
  EXPECT_EQ(why_not_executed(c, m, p), "");
  // The same on hosts 3 and 4 of five, where no rank has a GPU.
  p.stages[0].devices = {{3, -1}, {4, -1}};
  p.layers[0].groups[0].owners = {{3, -1}};
  p.layers[0].groups[1].owners = {{4, -1}};
  p.micro_batches = 2;
  m.hosts = 5;
  EXPECT_EQ(why_not_executed(c, m, p), "");
  EXPECT_EQ(n_ranks_of(p), 2);
  p.layers[0].groups[1].owners = {{2, -1}};
  EXPECT_NE(why_not_executed(c, m, p), "") << "where no rank is";
}

// Rank r has the r-th of GPUs and hosts without, in their order.
TEST(PlacedRanks, MayBeOfTwoKinds) {
  const ModelConfig c =
      ModelConfig::from_directory(std::string(TANDEM_SOURCE_DIR) + "/models/tiny-r1");
  Machine m = round_machine();
  m.hosts = 3;
  m.gpus.assign(2, m.gpus[0]);
  Placement p;
  p.backbone = stored_format(c);
  p.stages = {{0, c.n_layers - 1, {{0, 0}, {0, 1}, {1, -1}}, 1}};
  p.kv_tokens = 64;
  p.layers = {{1,
               2,
               {{range(0, 4), stored_expert_format(c), {{0, 0}}},
                {range(4, 8), stored_expert_format(c), {{0, -1}, {1, -1}}},
                {range(8, 16), stored_expert_format(c), {{0, 1}, {1, -1}}}}}};
  ASSERT_EQ(n_ranks_of(p), 3);
  EXPECT_EQ(ranks_on_gpus(p), (std::vector{true, true, false}));
  EXPECT_EQ(why_not_executed(c, m, p), "");
  const ExecutedParts first = executed_parts(c, m, p, {0, 3, 2}),
                      last = executed_parts(c, m, p, {2, 3, 2});
  ASSERT_TRUE(first.gpu);
  EXPECT_FALSE(last.gpu);
  EXPECT_EQ(first.grid.n_replicas, 3);
  EXPECT_EQ(first.ranks_of_expert, last.ranks_of_expert);
  EXPECT_EQ(first.ranks_of_expert[1][0], std::vector{0});
  EXPECT_EQ(first.ranks_of_expert[1][8], (std::vector{1, 2}));
  for (int e = 0; e < 16; ++e) EXPECT_EQ(first.gpu->experts[1][e], e < 4) << e;

  // Each rank knows the memory of its own host alone.
  m.nodes[0].memory_bytes = 1;
  for (NumaNode& node : m.nodes) node.memory_bytes = 1;
  EXPECT_TRUE(says(error_of([&] { executed_parts(c, m, p, {2, 3, 2}); }), "host1.cpu holds"));
  EXPECT_TRUE(says(error_of([&] { executed_parts(c, m, p, {0, 3, 2}); }), "host0.cpu holds"));
  m = round_machine();
  m.hosts = 3;
  m.gpus.assign(2, m.gpus[0]);

  const auto why_not = [&](auto change) {
    Placement changed = p;
    change(changed);
    return why_not_executed(c, m, changed);
  };
  const auto divided = [](Placement& q) {
    q.stages[0].devices = {{0, 0}, {1, -1}};
    q.stages[0].tp = 2;
    q.layers[0].groups[2].owners = {{1, -1}};
  };
  EXPECT_TRUE(says(why_not(divided), "a replica is on host0.gpu0, host1.cpu"));
  EXPECT_TRUE(says(why_not([](Placement& q) { q.micro_batches = 2; }), "set it to 1"));
  EXPECT_TRUE(says(why_not([](Placement& q) { q.stream_from_tokens = 64; }), "set it to 0"));
  EXPECT_TRUE(says(why_not([](Placement& q) { q.head_replicated = false; }), "dense_replicated"));
  // GPU 1 of a host comes after its GPU 0, and hosts in their order.
  for (const auto& devices : {std::vector<DeviceId>{{0, 1}, {0, 0}, {1, -1}},
                              std::vector<DeviceId>{{1, -1}, {0, 0}, {0, 1}},
                              std::vector<DeviceId>{{0, 0}, {0, -1}, {1, -1}}}) {
    p.stages[0].devices = devices;
    EXPECT_EQ(n_ranks_of(p), 1);
  }
}

TEST_F(OnTheCpu, PartsForOtherDevicesAreRefused) {
  EXPECT_EQ(after([] {}), "no error");
  // The refusal does not depend on the GPUs of this machine.
  EXPECT_TRUE(says(after([&] { group()["owners"] = {"host0.gpu0"}; }),
                   "placement: layer 3: expert 0 is on host0.gpu0: this program runs experts on "
                   "host0.cpu only"));
  EXPECT_TRUE(says(after([&] {
                     layers().push_back(layers()[0]);
                     layers()[0]["layers"] = "3-40";
                     layers()[1]["layers"] = "41-60";
                     layers()[1]["groups"].push_back(group());
                     layers()[1]["groups"][0]["experts"] = "0-16";
                     layers()[1]["groups"][1]["experts"] = "17-255";
                     layers()[1]["groups"][1]["owners"] = {"host1.cpu"};
                   }),
                   "layer 3: expert 17 is on host0.cpu, and in other layers on host1.cpu"));
  EXPECT_TRUE(
      says(after([&] { text_["backbone"]["stages"][0]["devices"] = {"host0.gpu0"}; }),
           "layers 0-60 of the backbone are on host0.gpu0: this program runs them on host0.cpu"));
  EXPECT_TRUE(says(after([&] { text_["backbone"]["format"] = "bf16"; }),
                   "the backbone is bf16: this program keeps it as stored, fp8"));
  EXPECT_TRUE(says(after([&] { text_["prefill"]["stream_from_tokens"] = 64; }), "set it to 0"));
  EXPECT_TRUE(
      says(after([&] { text_["micro_batches"] = 2; }), "no GPU that the CPU could overlap with"));
  EXPECT_TRUE(says(after([&] {
                     Json other = group();
                     group()["experts"] = "0-9";
                     other["experts"] = "10-255";
                     other["format"] = "int8";
                     layers()[0]["groups"].push_back(other);
                   }),
                   "layer 3: expert 0 is fp8 and expert 10 is int8"));
}

TEST_F(OnTheCpu, InvalidPlacementsAreRefused) {
  const Json sound = text_;
  group()["experts"] = "0-254";
  EXPECT_TRUE(says(refusal(), "layer 3: expert 255 has no owner"));
  text_ = sound;
  text_["experts"]["numa_columns"] = {2048};
  EXPECT_TRUE(says(refusal(), "lists 1 slices and this machine has 2 NUMA nodes"));
}

TEST_F(OnTheCpu, MemoryExceededNamesLayerAndExpert) {
  // The memory has room for everything else and for n experts.
  const auto room_for_experts = [&](double n) {
    Machine& m = planned_.machine;
    m.nodes.pop_back();
    text_["experts"].erase("numa_columns");
    const Placement p = placement_from_json(text_.dump(), "p.json");
    const DeviceMemory cpu = memory_by_device(planned_.config, m, p)[0];
    const int64_t expert = 44'050'944;
    const int64_t wanted = cpu.weights_bytes - 58 * 256 * expert + cpu.kv_bytes +
                           cpu.activation_bytes +
                           static_cast<int64_t>(n * static_cast<double>(expert));
    // capacity - 2 GB - 2 % of it = wanted
    m.nodes[0].memory_bytes = (wanted + 2'000'000'000) * 50 / 49;
  };
  room_for_experts(300.5);
  EXPECT_TRUE(says(refusal(), "(it is full from layer 4, expert 44 on)"));
  text_["kv"]["tokens"] = 100'000'000;
  EXPECT_TRUE(says(refusal(), "GB elsewhere"));
  EXPECT_FALSE(says(refusal(), "layer"));
}

// The backbone and some experts of each layer are on the first GPU, the other experts on the CPU.
class OnBoth : public OnTheCpu {
 protected:
  OnBoth() {
    Machine& m = planned_.machine;
    m.gpus = {round_machine().gpus[0], round_machine().gpus[0]};
    text_["backbone"]["stages"][0]["devices"] = {"host0.gpu0"};
    text_["embedding"]["on"] = "cpu";
    text_["head"]["on"] = "backbone";
    layers() = Json::parse(R"([
        {"layers": "3-9", "groups": [{"experts": "0-9", "format": "fp8", "owners": ["host0.gpu0"]},
                                 {"experts": "10-255", "format": "int8", "owners": ["host0.cpu"]}]},
        {"layers": "10-60", "groups": [{"experts": "0-255", "format": "fp8", "owners": ["host0.cpu"]}]}
        ])");
  }
};

TEST_F(OnBoth, GpuExpertsTakeNoHostMemory) {
  const ExecutedParts p = parts();
  ASSERT_TRUE(p.gpu);
  EXPECT_TRUE(p.gpu->embedding_on_cpu);
  EXPECT_TRUE(p.gpu->experts[2].empty());
  for (const int l : {3, 9, 10, 60})
    for (const int e : {0, 9, 10, 255}) {
      const bool on_gpu = l < 10 && e < 10;
      EXPECT_EQ(p.gpu->experts[l][e], on_gpu) << l << ", " << e;
      EXPECT_EQ(p.experts.keeps({"", l, e, WeightUse::kExpert, 1, 1}), !on_gpu);
    }
  EXPECT_FALSE(p.experts.keeps({"", 3, -1, WeightUse::kShared, 1, 1}));
  EXPECT_EQ(*p.experts.format(9), weight_format("int8"));
  EXPECT_FALSE(p.experts.format(10)) << "fp8 as stored";
}

TEST_F(OnBoth, MicroBatchesAreAsPlaced) {
  EXPECT_EQ(parts().gpu->micro_batches_from_sequences, 0);
  text_["micro_batches_from_sequences"] = 7;
  EXPECT_EQ(parts().gpu->micro_batches_from_sequences, 0);
  text_["micro_batches"] = 2;
  EXPECT_EQ(parts().gpu->micro_batches_from_sequences, 7);
  text_.erase("micro_batches_from_sequences");
  EXPECT_EQ(parts().gpu->micro_batches_from_sequences, 2);
}

TEST_F(OnBoth, UnsupportedPlacementsAreRefused) {
  EXPECT_EQ(after([] {}), "no error");
  EXPECT_TRUE(says(after([&] { group()["owners"] = {"host0.gpu1"}; }),
                   "expert 0 is on host0.gpu1: this program runs experts on host0.cpu and "
                   "host0.gpu0 only"));
  EXPECT_TRUE(says(after([&] {
                     group()["owners"] = {"host0.cpu", "host0.gpu0"};
                   }),
                   "expert 0 has 2 owners"));
  EXPECT_TRUE(
      says(after([&] { group()["format"] = "int8"; }), "which keeps experts as stored, fp8"));
  EXPECT_TRUE(says(after([&] { text_["head"]["on"] = "cpu"; }), "the head is on the CPU"));
  EXPECT_TRUE(says(after([&] { text_["backbone"]["stages"][0]["devices"] = {"host0.cpu"}; }),
                   "expert 0 is on host0.gpu0 and the backbone is not"));
  EXPECT_TRUE(says(after([&] {
                     text_["backbone"]["stages"][0]["devices"] = {"host0.gpu0", "host0.cpu"};
                   }),
                   "the backbone is on several devices"));
  planned_.machine.gpus[0].memory_bytes = 20'000'000'000;
  EXPECT_TRUE(says(refusal(), "placement: host0.gpu0 holds 20.00 GB"));
}

TEST(EvenlyOnGpu, FirstLayersGetTheRemainder) {
  const ModelConfig c = known_model("r1");
  const auto counts = [&](int64_t n) {
    std::vector<int64_t> of_layers;
    for (const auto& layer : evenly_on_gpu(c, n).experts)
      of_layers.push_back(std::count(layer.begin(), layer.end(), true));
    return of_layers;
  };
  const std::vector<int64_t> some = counts(58 * 3 + 2);
  EXPECT_EQ(some[2], 0);
  EXPECT_EQ(some[3], 4);
  EXPECT_EQ(some[4], 4);
  EXPECT_EQ(some[5], 3);
  EXPECT_EQ(some[60], 3);
  EXPECT_EQ(counts(0)[60], 0);
  EXPECT_EQ(counts(1'000'000)[3], 256);
  EXPECT_EQ(counts(1'000'000)[60], 256);
}

}  // namespace
}  // namespace tandem
