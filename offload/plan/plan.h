// The planner: which placement of a model on a machine serves a workload best, by prediction, and
// why. Pure functions; docs/planner.md describes the model of costs.
#pragma once
#include "offload/plan/predict.h"

namespace tandem {

// To which experts are narrowed where nothing wider fits.
constexpr WeightFormat kNarrowest{DType::kI4TwoLevel, 64};

struct Plan {
  Placement placement;
  Workload workload;  // with the concurrency decided on
  Prediction prediction;
  std::string limit;                 // what bounds decoding, in words
  std::vector<std::string> reasons;  // one a decision, with numbers
};

struct PlanRequest {
  std::string model_name;
  const ModelConfig& config;
  const Machine& machine;
  Workload workload;
  const RoutingStatistics& routing;
};

// The fastest placement that fits, with the widest format of experts that fits. Throws Error when
// the workload is not sound, or nothing fits: with what is missing in GB and the smallest change
// that would fit.
Plan plan(const PlanRequest& request);

// The same for a placement that exists; throws Error when it is not sound (check_placement).
Plan assess(const PlanRequest& request, const Placement& placement);

// What one change to the machine or the format would bring.
struct Change {
  std::string what;   // "experts in int4"
  bool fits = false;  // false: `refusal` says why not
  std::string refusal;
  Prediction prediction;
};
std::vector<Change> possible_changes(const PlanRequest& request, const Plan& plan);

}  // namespace tandem
