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

// One CPU and one GPU with round figures: 100 GB/s and 1 Tops/s, 1 TB/s and 100 Tops/s, 10 GB/s
// between.
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

// A plan with everything it points to.
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
