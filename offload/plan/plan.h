// The planner: the placement of a model on a machine with the best predicted score for a workload,
// with reasons. Pure functions; docs/planner.md describes the cost model.
#pragma once
#include <functional>

#include "offload/plan/assigned_experts.h"
#include "offload/plan/drafts.h"
#include "offload/plan/predict.h"

namespace tandem {

// The format of experts tried last, when no wider one fits.
constexpr WeightFormat kNarrowest{DType::kI4TwoLevel, 64};

struct Plan {
  Placement placement;
  Workload workload;      // with the chosen concurrency
  Prediction prediction;  // without drafts
  DraftPlan drafts;
  std::optional<PlacedBalance> balance;  // of the experts, if their use is known
  std::vector<int> standbys;             // hosts
  std::vector<std::string> commands;     // that start workers and the backbone, if it has workers
  std::string limit;                     // what bounds decoding, in words
  std::vector<std::string> reasons;      // one per decision, with numbers
};

struct PlanRequest {
  std::string model_name;
  const ModelConfig& config;
  const Machine& machine;
  Workload workload;
  const RoutingStatistics& routing;
  int n_standbys = 0;  // hosts without experts that replace lost workers
  // The file that will have the placement, which commands then name; empty: there is none.
  std::string placement_file = {};
  // Why no processes run a placement; empty: they run it. Null: not asked.
  std::function<std::string(const Placement&)> why_not_run = {};
  // The backbone is on exactly so many GPUs, or on the CPUs of so many hosts where the machine has
  // no GPU; 0: on any devices.
  int n_ranks = 0;
};

// The fastest placement that fits, with the widest expert format that fits. Throws Error when the
// workload is not sound, and when nothing fits: the message states what is missing in GB and the
// smallest change that would fit.
Plan plan(const PlanRequest& request);

// The placement of plan(), the workload with the chosen concurrency, and the prediction, without
// reasons. Throws what plan() throws.
struct PlannedPlacement {
  Placement placement;
  Workload workload;
  Prediction prediction;
  std::vector<int> standbys = {};  // hosts
};
PlannedPlacement plan_placement(const PlanRequest& request);

// Whether a prediction has the speed that the workload asks for.
bool meets(const Workload& workload, const Prediction& prediction);

// Maximum number of sequences of `context` tokens for which every device of the backbone has
// memory, whatever number the placement has.
int largest_concurrency(const ModelConfig& config, const Machine& machine,
                        const Placement& placement, int64_t context);

// Predicts and explains a given placement. Throws Error when it is not sound (check_placement), and
// for standbys, which no placement has.
Plan assess(const PlanRequest& request, const Placement& placement);

// Predicted effect of one change to the machine or the format.
struct Change {
  std::string what;   // "experts in int4"
  bool fits = false;  // false: `refusal` says why not
  std::string refusal;
  Prediction prediction;
};
std::vector<Change> possible_changes(const PlanRequest& request, const Plan& plan);

}  // namespace tandem
