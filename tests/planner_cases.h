// Models, machines and plans for the tests of the planner.
#pragma once
#include "io/json.h"
#include "io/machine_json.h"
#include "offload/plan/plan.h"
#include "tests/error_of.h"

namespace tandem {

inline ModelConfig known_model(const std::string& name) {
  const std::string path = TANDEM_SOURCE_DIR "/models/configs/" + name + ".json";
  return ModelConfig::from_json(read_text_file(path, 1 << 20), path);
}

inline Machine known_machine(const std::string& name) {
  return machine_from_file(TANDEM_SOURCE_DIR "/machines/" + name + ".json");
}

// One CPU and one GPU with round figures: 100 GB/s and 1 Tops/s, 1 TB/s and 100 Tops/s, and a link
// of 10 GB/s.
inline Machine round_machine() {
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

// The workload of the published cluster, with the number of sequences that gives the highest
// throughput.
inline Workload throughput_of_clusters() {
  Workload w;
  w.context = 4096;
  w.prompt_tokens = 2000;
  w.output_tokens = 1000;
  w.objective = Objective::kThroughput;
  w.concurrency = 0;
  return w;
}

// The backbone on the first GPU, all weights in FP8.
inline Placement r1_with_experts_on_the_cpu() {
  Placement p;
  p.backbone = {DType::kF8E4M3};
  p.stages = {{0, 60, {{0, 0}}, 1}};
  ExpertGroup group = {{}, {DType::kF8E4M3}, {{0, -1}}};
  for (int e = 0; e < 256; ++e) group.experts.push_back(e);
  p.layers = {{3, 60, {group}}};
  return p;
}

// A plan together with the objects it refers to.
struct Planned {
  Planned(const std::string& name, Machine m, Workload w = {})
      : config(known_model(name)),
        machine(std::move(m)),
        routing(config),
        request{name, config, machine, w, routing} {}
  Plan plan() const { return tandem::plan(request); }

  ModelConfig config;
  Machine machine;
  RoutingStatistics routing;
  PlanRequest request;
};

}  // namespace tandem
