// Placements edited by a user: what is refused, and that reading returns what was written.
#include "offload/plan/placement.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "offload/plan/placement_json.h"
#include "tests/planner_cases.h"

namespace tandem {
namespace {

using Json = nlohmann::json;

// R1 on two sockets and a GPU, with all experts on the CPU.
class Edited : public ::testing::Test {
 protected:
  Edited() : planned_("r1", known_machine("2x6454s-4090")) {
    text_ = placement_to_json(planned_.plan().placement);
    text_["experts"]["layers"] = nlohmann::ordered_json::parse(
        R"([{"layers": "3-60",
             "groups": [{"experts": "0-255", "format": "fp8", "owners": ["host0.cpu"]}]}])");
  }
  // The error for the placement after `edit`.
  std::string refusal(const std::function<void(Json&)>& edit) const {
    Json edited = Json::parse(text_.dump());
    edit(edited);
    return error_of([&] {
      check_placement(planned_.config, planned_.machine,
                      placement_from_json(edited.dump(), "p.json"));
    });
  }
  static Json& group(Json& p) { return p["experts"]["layers"][0]["groups"][0]; }

  Planned planned_;
  nlohmann::ordered_json text_;
};

TEST_F(Edited, UnchangedIsSound) {
  EXPECT_EQ(refusal([](Json&) {}), "no error");
  EXPECT_EQ(placement_to_json(placement_from_json(text_.dump(), "p.json")), text_);
}

// The file keeps the prediction for --timeline; the placement does not depend on it.
TEST_F(Edited, KeepsWhatWasPredicted) {
  EXPECT_TRUE(planned_layers(text_.dump(), "p.json").empty());
  nlohmann::ordered_json file = text_;
  file["predicted"] = nlohmann::ordered_json::parse(
      R"({"decode": {"tokens": 1, "moe_layer":
            {"layers": 58, "seconds": 0.002, "parts": {"router": 0.001, "cpu_experts": 0.0015}}},
          "prefill": {"tokens": 512, "dense_layer": {"seconds": 1}}, "load_seconds": null})");
  EXPECT_EQ(placement_to_json(placement_from_json(file.dump(), "p.json")), text_);
  const std::vector<PlannedLayer> layers = planned_layers(file.dump(), "p.json");
  ASSERT_EQ(layers.size(), 1u) << "a chunk has no MoE layer here";
  EXPECT_EQ(layers[0].tokens, 1);
  EXPECT_EQ(layers[0].time.seconds, 0.002);
  EXPECT_EQ(layers[0].time[Part::kCpuExperts], 0.0015);
  EXPECT_EQ(layers[0].time[Part::kShared], 0);
  file["predicted"]["decode"]["moe_layer"]["parts"]["router"] = "1 ms";
  EXPECT_TRUE(says(error_of([&] { planned_layers(file.dump(), "p.json"); }),
                   "p.json: predicted: decode: moe_layer: parts: router is \"1 ms\""));
}

TEST_F(Edited, KeepsTheCacheInFp8OnGpusAlone) {
  const auto fp8 = [](Json& p) { p["kv"]["type"] = "fp8"; };
  EXPECT_EQ(refusal(fp8), "no error");
  text_["kv"]["type"] = "fp8";
  EXPECT_EQ(placement_to_json(placement_from_json(text_.dump(), "p.json")), text_);
  EXPECT_TRUE(says(refusal([](Json& p) { p["backbone"]["stages"][0]["devices"] = {"host0.cpu"}; }),
                   "must be bf16, as a CPU computes attention"));
  // A context of 131,072 tokens takes 9.2 GB in BF16, 5.2 GB in FP8.
  const auto long_context = [](Json& p) { p["kv"]["tokens"] = 131'072; };
  EXPECT_EQ(refusal(long_context), "no error");
  text_["kv"]["type"] = "bf16";
  EXPECT_TRUE(says(refusal(long_context), "9.21 GB of KV cache"));
}

// Rows travel between replicas of the backbone that have the experts themselves.
TEST_F(Edited, SaysHowRowsTravel) {
  const auto fp8 = [](Json& p) { p["experts"]["ep_rows"] = "fp8"; };
  EXPECT_TRUE(says(refusal(fp8), "ep_rows fp8: must be exact, as no rows travel between ranks"));
  const auto exact = [](Json& p) { p["experts"]["ep_rows"] = "exact"; };
  EXPECT_EQ(refusal(exact), "no error");
  EXPECT_TRUE(says(refusal([](Json& p) { p["experts"]["ep_rows"] = "bf16"; }),
                   "ep_rows is \"bf16\": expected exact or fp8"));
  planned_.machine = known_machine("8xh200");
  const Json replicas = Json::parse(R"(["host0.gpu0", "host0.gpu1"])");
  text_["backbone"]["stages"][0]["devices"] = replicas;
  text_["experts"]["layers"][0]["groups"][0]["owners"] = replicas;
  text_["experts"].erase("numa_columns");
  text_["embedding"]["on"] = "backbone";
  const auto without_room = [&](const std::function<void(Json&)>& edit) {
    return says(refusal(edit), "host0.gpu0 holds");
  };
  EXPECT_TRUE(without_room(fp8)) << "it is sound but for the memory of two GPUs";
  text_["experts"]["ep_rows"] = "fp8";
  EXPECT_EQ(placement_to_json(placement_from_json(text_.dump(), "p.json")), text_);
}

TEST_F(Edited, NamesLayerAndExpert) {
  const int first = planned_.config.n_dense_layers;
  const auto r = [&](const std::function<void(Json&)>& edit) { return refusal(edit); };
  EXPECT_TRUE(says(r([](Json& p) { group(p)["experts"] = "3-255"; }),
                   fmt::format("placement: layer {}: expert 0 has no owner: name one", first)));
  EXPECT_TRUE(says(r([](Json& p) { group(p)["owners"] = {"host0.gpu7"}; }),
                   fmt::format("layer {}: expert ", first)));
  EXPECT_TRUE(says(r([](Json& p) { group(p)["owners"] = {"host0.gpu7"}; }),
                   "is owned by host0.gpu7, which 2x Xeon 6454S + RTX 4090 lacks"));
  EXPECT_TRUE(says(r([](Json& p) { group(p)["owners"] = {"host1.cpu"}; }), "host1.cpu"));
  EXPECT_TRUE(says(r([](Json& p) {
                     group(p)["owners"] = {"host0.cpu", "host0.cpu"};
                   }),
                   "names host0.cpu twice"));
  EXPECT_TRUE(says(r([](Json& p) { group(p)["owners"] = Json::array(); }), "has no owner"));
  EXPECT_TRUE(says(r([](Json& p) { group(p)["experts"] = "0-256"; }),
                   fmt::format("layer {}: expert 256 does not exist: the model has 0-255", first)));
  EXPECT_TRUE(says(r([](Json& p) { p["experts"]["layers"][0]["groups"].push_back(group(p)); }),
                   "is listed twice"));
  EXPECT_TRUE(says(r([](Json& p) { p["experts"]["layers"] = Json::array(); }),
                   fmt::format("layer {}: no expert has an owner", first)));
  EXPECT_TRUE(
      says(r([](Json& p) { p["experts"]["layers"][0]["layers"] = "3-61"; }), "layers 3-61"));
}

TEST_F(Edited, RefusesWhatDoesNotFit) {
  EXPECT_TRUE(says(refusal([](Json& p) { p["kv"]["tokens"] = 1'000'000; }),
                   "host0.gpu0 holds 25.77 GB and gets"));
  EXPECT_TRUE(says(refusal([](Json& p) { group(p)["owners"] = {"host0.gpu0"}; }), "GB elsewhere"));
}

Machine two_hosts_of_two_gpus() {
  Machine m = round_machine();
  m.hosts = 2;
  m.gpus.push_back(m.gpus[0]);
  return m;
}

// The GPUs of a host share an embedding or head on its CPU.
TEST(MemoryByDevice, ATableOnTheCpuIsCountedOncePerHost) {
  const ModelConfig r1 = known_model("r1");
  const Machine m = two_hosts_of_two_gpus();
  Placement p = r1_with_experts_on_the_cpu();
  p.stages = {{0, 60, {{0, 0}, {0, 1}, {1, 0}, {1, 1}}, 1}};
  const auto weights = [&](bool embedding_on_cpu, bool head_on_cpu) {
    p.embedding_on_cpu = embedding_on_cpu;
    p.head_on_cpu = head_on_cpu;
    std::vector<int64_t> bytes;
    for (const DeviceMemory& d : memory_by_device(r1, m, p)) bytes.push_back(d.weights_bytes);
    return bytes;  // for each host its CPU and its two GPUs
  };
  constexpr int64_t kTable = int64_t{129'280} * 7168 * 2;
  const auto moved = [&](const std::vector<int64_t>& to_cpu, const std::vector<int64_t>& on_gpus) {
    std::vector<int64_t> difference;
    for (size_t i = 0; i < to_cpu.size(); ++i) difference.push_back(to_cpu[i] - on_gpus[i]);
    return difference;
  };
  const std::vector<int64_t> one_table = {kTable, -kTable, -kTable, kTable, -kTable, -kTable};
  EXPECT_EQ(moved(weights(true, false), weights(false, false)), one_table);
  EXPECT_EQ(moved(weights(true, true), weights(true, false)), one_table);
}

// Devices of all replicas share dense layers and the head, or those of each have them whole.
TEST(MemoryByDevice, WhatReplicasShareIsCountedOnce) {
  const ModelConfig r1 = known_model("r1");
  const Machine m = two_hosts_of_two_gpus();
  Placement p = r1_with_experts_on_the_cpu();
  p.stages = {{0, 60, {{0, 0}, {0, 1}, {1, 0}, {1, 1}}, 2}};
  const auto weights = [&] {
    return memory_by_device(r1, m, p)[1].weights_bytes;  // of a GPU
  };
  constexpr int64_t kTable = int64_t{129'280} * 7168 * 2;
  const int64_t dense = 3 * backbone_layer_bytes(r1, false, p.backbone).dense;
  const int64_t whole = weights();
  p.head_replicated = false;
  EXPECT_EQ(whole - weights(), kTable / 4);  // of two ranks' halves, a half of each is elsewhere
  p.head_replicated = true;
  p.dense_replicated = false;
  EXPECT_NEAR(static_cast<double>(whole - weights()), static_cast<double>(dense) / 4, 1);
}

TEST_F(Edited, RefusesStagesSplitsAndSlices) {
  EXPECT_TRUE(says(refusal([](Json& p) { p["backbone"]["stages"][0]["layers"] = "0-59"; }),
                   "layer 60 has no stage"));
  EXPECT_TRUE(says(refusal([](Json& p) { p["backbone"]["stages"] = Json::array(); }), "no stages"));
  EXPECT_TRUE(says(refusal([](Json& p) { p["backbone"]["stages"][0]["tp"] = 2; }),
                   "1 devices cannot form replicas of 2"));
  EXPECT_TRUE(says(refusal([](Json& p) { p["backbone"]["stages"][0]["devices"] = {"host0.gpu1"}; }),
                   "layers 0-60 are on host0.gpu1, which"));
  EXPECT_TRUE(says(refusal([](Json& p) {
                     p["experts"]["numa_columns"] = {1000, 1048};
                   }),
                   "slice of 1000 columns: must be a multiple of 128"));
  EXPECT_TRUE(says(refusal([](Json& p) {
                     p["experts"]["numa_columns"] = {1024, 896};
                   }),
                   "add up to 1920 and an expert has 2048"));
  EXPECT_TRUE(
      says(refusal([](Json& p) { p["experts"]["numa_columns"] = {2048}; }), "lists 1 slices"));
}

TEST_F(Edited, RefusesTypingErrors) {
  EXPECT_TRUE(says(refusal([](Json& p) { p["embeding"] = 1; }), "\"embeding\" is no known field"));
  EXPECT_TRUE(says(refusal([](Json& p) { p["embedding"]["on"] = "gpu"; }),
                   "p.json: embedding: on is \"gpu\": expected cpu or backbone"));
  EXPECT_TRUE(says(refusal([](Json& p) { p.erase("kv"); }), "kv is missing"));
  EXPECT_TRUE(says(refusal([](Json& p) { p["kv"]["type"] = "fp4"; }), "expected bf16 or fp8"));
  EXPECT_TRUE(says(refusal([](Json& p) { group(p)["format"] = "fp7"; }), "fp7"));
  EXPECT_TRUE(says(refusal([](Json& p) { group(p)["owners"] = {"gpu0"}; }),
                   "\"gpu0\" is not a device: expected a name like host0.cpu or host0.gpu0"));
  EXPECT_TRUE(says(refusal([](Json& p) { p["prefill"]["chunk_tokens"] = 65'537; }),
                   "chunk_tokens is 65537"));
  EXPECT_TRUE(says(refusal([](Json& p) { p["micro_batches"] = 3; }), "micro_batches is 3"));
  EXPECT_TRUE(says(refusal([](Json& p) { p["micro_batches_from_sequences"] = 1; }),
                   "micro_batches_from_sequences is 1"));
  for (const char* bad : {"", "5-3", "3,3", "x", "1-", "-1", "1,,2", "1-2-3", "99999999999", "1;2"})
    EXPECT_TRUE(says(refusal([&](Json& p) { group(p)["experts"] = bad; }), "expected ascending"))
        << bad;
}

TEST(Ranges, AsTextAndBack) {
  EXPECT_EQ(ranges_text({0, 1, 2, 3, 7, 9, 10}), "0-3,7,9-10");
  EXPECT_EQ(parse_ranges("0-3,7,9-10", 11, ""), (std::vector<int>{0, 1, 2, 3, 7, 9, 10}));
  EXPECT_EQ(parse_ranges("4", 5, ""), std::vector<int>{4});
}

}  // namespace
}  // namespace tandem
