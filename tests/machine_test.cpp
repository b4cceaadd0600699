// Machines as JSON: the files in machines/, and what is refused.
#include "core/machine.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "io/json.h"
#include "io/machine_json.h"
#include "tests/error_of.h"

namespace tandem {
namespace {

using Json = nlohmann::json;

const std::string kMachines = TANDEM_SOURCE_DIR "/machines/";

Json described(const std::string& name) {
  return Json::parse(read_text_file(kMachines + name + ".json", 1 << 20));
}

// The error for a machine that is changed by `patch` (RFC 7386: null removes).
std::string refusal(const std::string& name, const char* patch) {
  Json machine = described(name);
  machine.merge_patch(Json::parse(patch));
  return error_of([&] { machine_from_json(machine.dump(), "m.json"); });
}

TEST(Machine, EveryFileOfMachinesIsReadAndNamesItsSources) {
  int n = 0;
  for (const auto& entry : std::filesystem::directory_iterator(kMachines)) {
    SCOPED_TRACE(entry.path());
    const Machine m = machine_from_file(entry.path());
    EXPECT_GT(m.cores(), 0);
    const Json sources = described(entry.path().stem()).at("sources");
    for (const char* key : {"machine", "read_bytes_per_second", "peak_ops_per_second", "disk"})
      EXPECT_TRUE(sources.contains(key)) << key;
    EXPECT_EQ(sources.contains("gpu"), m.n_all_gpus() > 0);
    EXPECT_EQ(sources.contains("network"),
              m.network.bytes_per_second > 0 || m.between_kinds.bytes_per_second > 0);
    ++n;
  }
  EXPECT_EQ(n, 17);
}

TEST(Machine, NodesAreAlikeUnlessListed) {
  const Machine m = machine_from_file(kMachines + "2x6454s-4090.json");
  ASSERT_EQ(m.nodes.size(), 2u);
  EXPECT_EQ(m.nodes[1].cores, 32);
  EXPECT_EQ(m.nodes[1].memory_bytes, int64_t{512} << 30);
  EXPECT_DOUBLE_EQ(m.nodes[1].read_bytes_per_second, 0.8 * 307.2e9);
  EXPECT_EQ(m.n_gpus(), 1);
  EXPECT_EQ(machine_from_file(kMachines + "12x8xh100.json").n_gpus(), 96);
}

TEST(Machine, WrittenAndReadIsTheSame) {
  for (const auto& entry : std::filesystem::directory_iterator(kMachines)) {
    const auto once = machine_to_json(machine_from_file(entry.path()));
    const auto twice = machine_to_json(machine_from_json(once.dump(), "again"));
    EXPECT_EQ(once, twice) << entry.path();
  }
}

TEST(Machine, RefusesImpossibleFigures) {
  const auto r = [](const char* patch) { return refusal("2x6454s-4090", patch); };
  EXPECT_EQ(r("{}"), "no error");
  EXPECT_EQ(r(R"({"cores": 0})"), "m.json: cores is 0: expected a whole number 2 .. 1048576");
  EXPECT_EQ(r(R"({"cores": null})"),
            "m.json: cores is missing: expected a whole number 2 .. 1048576");
  EXPECT_TRUE(says(r(R"({"cores": 63})"), "cores is 63: not a multiple of 2 numa_nodes"));
  EXPECT_TRUE(says(r(R"({"memory_bytes": -5})"), "memory_bytes is -5: expected a whole number"));
  EXPECT_TRUE(says(r(R"({"memory_bytes": 1.5})"), "memory_bytes is 1.5"));
  EXPECT_TRUE(says(r(R"({"memory_bytes": 18446744073709551615})"), "expected a whole number"));
  EXPECT_TRUE(says(r(R"({"isa": "sse9"})"), "isa is \"sse9\": expected reference, avx2"));
  EXPECT_TRUE(says(r(R"({"peak_ops_per_second": {"int8": null}})"), "give peak_ops_per_second"));
  EXPECT_TRUE(says(r(R"({"peak_ops_per_second": {"fp32": 0}})"),
                   "m.json: peak_ops_per_second: fp32 is 0: expected a number above 0"));
  EXPECT_TRUE(says(r(R"({"read_bytes_per_second": {"all": "fast"}})"), "all is \"fast\""));
  EXPECT_TRUE(says(r(R"({"read_bytes_per_second": {"one_thread": 1e15}})"),
                   "one_thread is 1e+15, more than all with 4.9152e+11"));
  EXPECT_TRUE(says(r(R"({"read_bytes_per_second": {"cross": null}})"), "cross is missing"));
  EXPECT_TRUE(says(r(R"({"read_bytes_per_second": {"cross": 1e15}})"), "cross is 1e+15, more"));
  EXPECT_TRUE(says(r(R"({"sockets": 4})"), "sockets is 4 with 2 numa_nodes"));
  EXPECT_TRUE(says(r(R"({"memroy_bytes": 5})"), "\"memroy_bytes\" is no known field"));
  EXPECT_TRUE(says(r(R"({"hosts": 2})"), "network is missing: say how the 2 hosts"));
  EXPECT_TRUE(says(r(R"({"hosts": 0})"), "hosts is 0"));
  EXPECT_TRUE(says(r(R"({"nodes": []})"), "numa_nodes is 2: `nodes` lists 0"));
  EXPECT_TRUE(says(r(R"({"gpus": [{"name": "x"}]})"), "m.json: gpus[0]: memory_bytes is missing"));
  EXPECT_TRUE(says(error_of([] { machine_from_json("[1]", "m.json"); }), "expected a JSON object"));
  EXPECT_TRUE(says(error_of([] { machine_from_json("{", "m.json"); }), "broken JSON"));
  EXPECT_TRUE(says(error_of([] { machine_from_file("/no/such"); }), "cannot open /no/such"));
}

TEST(Machine, HostsOfSeveralKinds) {
  const Machine m = machine_from_file(kMachines + "office-4090-3x256gb.json");
  EXPECT_EQ(m.n_kinds(), 2);
  EXPECT_EQ(m.label, "GPU box");
  EXPECT_EQ(m.other_kinds[0].label, "memory box");
  EXPECT_EQ(m.other_kinds[0].hosts, 3);
  EXPECT_EQ(m.n_hosts(), 4);
  EXPECT_EQ(m.between_kinds.bytes_per_second, 2.8125e9);
  EXPECT_EQ(m.other_kinds[0].network.bytes_per_second, 2.8125e9) << "it has none of its own";
  EXPECT_EQ(
      machine_from_file(kMachines + "8xh20-32x4090.json").other_kinds[0].network.bytes_per_second,
      2.8125e9);
  const auto r = [](const char* patch) { return refusal("office-4090-3x256gb", patch); };
  EXPECT_EQ(r(R"({"request_seconds": 4e-5})"), "no error");
  EXPECT_TRUE(says(r(R"({"network": null})"), "network is missing: say how the 2 kinds"));
  EXPECT_TRUE(says(r(R"({"kinds": []})"), "expected at least one kind"));
  EXPECT_TRUE(says(r(R"({"kinds": [5]})"), "kinds[0]: expected a JSON object"));
  EXPECT_TRUE(says(r(R"({"cpu": "x"})"), "\"cpu\" is no known field"));
  EXPECT_TRUE(says(r(R"({"hosts": 2})"), "\"hosts\" is no known field"));
  EXPECT_TRUE(says(r(R"({"request_seconds": -1})"), "request_seconds is -1"));
  Json machine = described("office-4090-3x256gb");
  machine["kinds"][1]["cores"] = 0;
  EXPECT_TRUE(says(error_of([&] { machine_from_json(machine.dump(), "m.json"); }),
                   "m.json: kinds[1]: cores is 0"));
  machine["kinds"][1]["cores"] = 64;
  machine["kinds"][0]["hosts"] = machine["kinds"][1]["hosts"] = 40000;
  EXPECT_TRUE(says(error_of([&] { machine_from_json(machine.dump(), "m.json"); }),
                   "kinds[1]: hosts is 40000: expected at most 65536 in all"));
}

TEST(Machine, CurvesOfMeasuredEfficiency) {
  Json machine = described("2x6980p");
  machine["efficiency"] = Json::parse(
      R"({"experts": {"fp8": [[1, 0.9], [4, 0.8]], "int4": [[1, 0.5]]}, "absorbed": [[512, 1.5]]})");
  const Machine m = machine_from_json(machine.dump(), "m.json");
  ASSERT_EQ(m.curves.size(), 3u);
  EXPECT_EQ(m.curves[0].work + m.curves[0].format, "expertsfp8");
  EXPECT_EQ(m.curves[0].points[1], std::make_pair(4.0, 0.8));
  EXPECT_EQ(m.curves[2].work + m.curves[2].format, "absorbed");
  EXPECT_EQ(Json::parse(machine_to_json(m).dump())["efficiency"], machine["efficiency"]);

  const auto r = [](const std::string& curve) {
    return refusal("2x6980p",
                   fmt::format(R"({{"efficiency": {{"dense": {{"bf16": {}}}}}}})", curve).c_str());
  };
  EXPECT_EQ(r("[[1, 0.5], [2, 0.4]]"), "no error");
  for (const char* bad : {"[]", "[1, 0.5]", "[[1]]", "[[0, 0.5]]", "[[1, 0]]", "[[1, 2.1]]",
                          "[[2, 0.5], [1, 0.5]]", "[[1, 0.5], [1, 0.5]]", "[[1, \"x\"]]", "7"})
    EXPECT_TRUE(says(r(bad), "m.json: efficiency: dense: bf16 is ")) << bad;
  EXPECT_TRUE(says(refusal("2x6980p", R"({"efficiency": {"dense": {"fp7": [[1, 1]]}}})"),
                   "\"fp7\" is no known field"));
  EXPECT_TRUE(says(refusal("2x6980p", R"({"efficiency": {"magic": []}})"), "\"magic\""));
}

TEST(Machine, RefusesNodesAndGpusThatContradict) {
  const auto nodes = [](const char* second) {
    return fmt::format(R"({{"nodes": [{{"cores": 32, "memory_bytes": 549755813888,
                          "read_bytes_per_second": 245.76e9}}, {}]}})",
                       second);
  };
  const auto r = [&](const char* second) { return refusal("2x6454s-4090", nodes(second).c_str()); };
  EXPECT_EQ(r(R"({"cores": 32, "memory_bytes": 549755813888, "read_bytes_per_second": 245.8e9})"),
            "no error");
  EXPECT_TRUE(
      says(r(R"({"cores": 31, "memory_bytes": 549755813888, "read_bytes_per_second": 245.8e9})"),
           "cores is 64: `nodes` have 63"));
  EXPECT_TRUE(
      says(r(R"({"cores": 32, "memory_bytes": 549755813887, "read_bytes_per_second": 245.8e9})"),
           "memory_bytes is 1099511627776: `nodes` have 1099511627775"));
  EXPECT_TRUE(
      says(r(R"({"cores": 32, "memory_bytes": 549755813888, "read_bytes_per_second": 1e9})"),
           "all is 491520000000.0: `nodes` read 2.4676e+11"));
  EXPECT_TRUE(says(r(R"({"cores": 0})"), "nodes[1]: cores is 0"));

  Json pageable = described("2x6454s-4090");
  pageable["gpus"][0]["h2d_pageable_bytes_per_second"] = 26e9;
  EXPECT_TRUE(says(error_of([&] { machine_from_json(pageable.dump(), "m.json"); }),
                   "more than pinned memory"));
  EXPECT_TRUE(says(refusal("8xh200", R"({"gpu_link": null})"), "how the 8 GPUs of a host"));
  Json two = described("8xh200");
  two["gpus"].push_back(described("2x6454s-4090")["gpus"][0]);
  EXPECT_TRUE(says(error_of([&] { machine_from_json(two.dump(), "m.json"); }), "must be alike"));
}

}  // namespace
}  // namespace tandem
