#include "tests/planner_cases.h"

#include <numeric>

#include "io/json.h"

namespace tandem {

ModelConfig known_model(const std::string& name) {
  const std::string path = TANDEM_SOURCE_DIR "/models/configs/" + name + ".json";
  return ModelConfig::from_json(read_text_file(path, 1 << 20), path);
}

Machine known_machine(const std::string& name) {
  return machine_from_file(TANDEM_SOURCE_DIR "/machines/" + name + ".json");
}

Machine round_machine() {
  Machine m;
  m.name = "round";
  m.cpu = "cpu";
  m.isa = "avx512";
  m.nodes = {{8, 1'000'000'000'000, 100e9}};
  m.one_thread_read_bytes_per_second = 10e9;
  m.peak = {1e12, 1e12, 0, 1e12};
  m.gpus = {{"gpu", 40'000'000'000, 1e12, {100e12, 100e12, 100e12, 100e12}, 10e9, 10e9, 5e9, 5e9}};
  m.disk_read_bytes_per_second = 5e9;
  return m;
}

Workload throughput_of_clusters() {
  Workload w;
  w.context = 4096;
  w.prompt_tokens = 2000;
  w.output_tokens = 1000;
  w.objective = Objective::kThroughput;
  w.concurrency = 0;
  return w;
}

Placement r1_with_experts_on_the_cpu() {
  Placement p;
  p.backbone = {DType::kF8E4M3};
  p.stages = {{0, 60, {{0, 0}}, 1}};
  ExpertGroup group = {{}, {DType::kF8E4M3}, {{0, -1}}};
  for (int e = 0; e < 256; ++e) group.experts.push_back(e);
  p.layers = {{3, 60, {group}}};
  return p;
}

Machine round_kinds(int n) {
  Machine m = round_machine();
  m.label = "GPU box";
  HostKind memory = m;
  memory.label = "memory box";
  memory.gpus.clear();
  memory.nodes[0].read_bytes_per_second = 200e9;
  memory.hosts = n;
  memory.network = {40e9, 2e-6};
  m.other_kinds = {memory};
  m.between_kinds = {10e9, 5e-6};
  return m;
}

std::vector<int> range(int first, int end) {
  std::vector<int> numbers(end - first);
  std::iota(numbers.begin(), numbers.end(), first);
  return numbers;
}

Placement with_owners(const Owners& owners) {
  Placement p = r1_with_experts_on_the_cpu();
  p.kv_tokens = 8192;
  p.layers[0].groups.clear();
  for (const auto& [experts, devices] : owners)
    p.layers[0].groups.push_back({experts, {DType::kF8E4M3}, devices});
  return p;
}

}  // namespace tandem
