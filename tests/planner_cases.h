// Models, machines and plans for the tests of the planner.
#pragma once
#include "io/machine_json.h"
#include "offload/plan/plan.h"
#include "tests/error_of.h"

namespace tandem {

ModelConfig known_model(const std::string& name);

Machine known_machine(const std::string& name);

// One CPU and one GPU with round figures: 100 GB/s and 1 Tops/s, 1 TB/s and 100 Tops/s, and a link
// of 10 GB/s.
Machine round_machine();

// The workload of the published cluster, with the number of sequences that gives the highest
// throughput.
Workload throughput_of_clusters();

// The backbone on the first GPU, all weights in FP8.
Placement r1_with_experts_on_the_cpu();

// A host of round figures with a GPU, and `n` without, whose memory is twice as fast.
Machine round_kinds(int n);

// The numbers from `first` to before `end`.
std::vector<int> range(int first, int end);

// R1's backbone on host 0's GPU, and these owners of experts in every layer.
using Owners = std::vector<std::pair<std::vector<int>, std::vector<DeviceId>>>;
Placement with_owners(const Owners& owners);

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
