#include "cli/plan/planned_ranks.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "core/check.h"
#include "io/atomic_file.h"
#include "offload/parts/executed_parts.h"
#include "offload/plan/placement_json.h"

namespace tandem {

bool leaves_ranks_to_a_plan(const ModelOptions& o) {
  return o.placement.empty() && o.n_replicas == 0 && o.tp == 0 && o.n_stages == 0 && o.ep == 0 &&
         o.dispatch == ExpertDispatch::kAuto && o.micro_batches == 0 && !o.experts &&
         !o.workers.any() && o.device != DeviceChoice::kCpu;
}

std::optional<PlannedPlacement> plan_for_ranks(const Options& o, const Machine& machine, int n,
                                               bool serves, std::string& why_not) {
  const ModelConfig config = ModelConfig::from_directory(o.model.directory);
  Machine of_ranks = machine;
  of_ranks.hosts = 1;
  of_ranks.gpus.resize(n);
  Workload w;
  w.context = o.model.context > 0 ? o.model.context : default_context(config);
  w.concurrency = serves ? o.serve.max_batch : 1;
  w.objective = serves ? Objective::kThroughput : Objective::kLatency;
  w.prompt_tokens = w.output_tokens =
      static_cast<int>(std::clamp<int64_t>(w.context / 2, 1, w.prompt_tokens));
  w.kv = o.model.kv;
  w.expert_rows = o.model.rows.value_or(ExpertRows::kExact);
  w.experts_move = serves && o.serve.rebalance != Rebalance::kOff;
  const RoutingStatistics routing(config);
  try {
    PlannedPlacement planned = plan_placement({.model_name = o.model.directory,
                                               .config = config,
                                               .machine = of_ranks,
                                               .workload = w,
                                               .routing = routing,
                                               .n_backbone_gpus = n});
    why_not = why_not_executed(config, of_ranks, planned.placement);
    if (why_not.empty()) return planned;
  } catch (const Error& error) {
    why_not = error.what();
  }
  return {};
}

PlacementFile::PlacementFile(const Placement& placement)
    : path_((std::filesystem::temp_directory_path() / "tandem-placement-XXXXXX").string()) {
  const int file = mkstemp(path_.data());
  require(file >= 0, "{} cannot be written: set TMPDIR to a folder that can", path_);
  close(file);
  write_new_file(path_, placement_to_json(placement).dump(2) + "\n");
}

PlacementFile::~PlacementFile() { unlink(path_.c_str()); }

}  // namespace tandem
