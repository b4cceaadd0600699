// A plan as `tandem plan` prints it: JSON, text tables, and a plot.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "offload/plan/batch_table.h"
#include "offload/plan/plan.h"
#include "offload/servers/server_roles.h"
#include "offload/simulation/simulate.h"
#include "offload/simulation/worker_faults.h"

namespace tandem {

// Fields are listed in docs/planner_files.md.
nlohmann::ordered_json plan_report(const PlanRequest& request, const Plan& plan,
                                   const std::vector<Change>& changes);
nlohmann::ordered_json prediction_report(const Prediction& prediction);
// The placement and its prediction.
nlohmann::ordered_json placement_file(const Plan& plan);

std::string plan_text(const PlanRequest& request, const Plan& plan,
                      const std::vector<Change>& changes);

// A simulation with or without balanced experts and overlap of two micro-batches.
struct SimulatedVariant {
  bool balanced, two_batches;
  int n_copies;  // extra replicas of hot experts
  Simulation simulation;
};
std::vector<SimulatedVariant> simulate_variants(SimulatedCluster cluster);
nlohmann::ordered_json simulation_report(const std::vector<SimulatedVariant>& variants);
std::string simulation_text(const SimulatedCluster& cluster,
                            const std::vector<SimulatedVariant>& variants);

// Decoding while workers fail.
nlohmann::ordered_json faults_report(const FaultRun& run);
std::string faults_text(const FaultRun& run);

// Servers with and without roles, as predicted and as simulated.
nlohmann::ordered_json servers_report(const ServerPlan& plan);
std::string servers_text(const ServerPlan& plan);

// Plans of one preset, for different concurrencies.
nlohmann::ordered_json preset_report(const std::vector<Plan>& plans);
std::string preset_text(const std::vector<Plan>& plans);

// What batches of 1 to 65,536 tokens ask of the placement.
nlohmann::ordered_json batch_table_report(const BatchTable& table);
std::string batch_table_text(const BatchTable& table);

// SVG of the memory by device, and of one layer's parts as a timeline, for decode and prefill.
std::string plan_plot(const PlanRequest& request, const Plan& plan);

}  // namespace tandem
