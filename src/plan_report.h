// A plan as `tandem plan` prints it: JSON, tables in words, and a drawing.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "offload/plan/plan.h"
#include "offload/plan/simulate.h"

namespace tandem {

// Fields as in docs/planner.md.
nlohmann::ordered_json plan_report(const PlanRequest& request, const Plan& plan,
                                   const std::vector<Change>& changes);
nlohmann::ordered_json prediction_report(const Prediction& prediction);
// The placement, and what is predicted of it.
nlohmann::ordered_json placement_file(const Plan& plan);

std::string plan_text(const PlanRequest& request, const Plan& plan,
                      const std::vector<Change>& changes);

// The same layers with and without balancing of experts and overlap of two batches.
struct SimulatedVariant {
  bool balanced, two_batches;
  int n_copies;  // of hot experts, beside the one of each
  Simulation simulation;
};
std::vector<SimulatedVariant> simulate_variants(SimulatedCluster cluster);
nlohmann::ordered_json simulation_report(const std::vector<SimulatedVariant>& variants);
std::string simulation_text(const SimulatedCluster& cluster,
                            const std::vector<SimulatedVariant>& variants);

// An SVG: memory by device, and one layer's parts as a timeline, of decoding and of prefill.
std::string plan_plot(const PlanRequest& request, const Plan& plan);

}  // namespace tandem
