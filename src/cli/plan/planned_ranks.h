// `--ranks N` where the command line does not say how the ranks divide the model: plan() decides,
// for the first N GPUs of this machine as `tandem bench machine` measured it.
#pragma once
#include <optional>
#include <string>

#include "cli/options.h"
#include "offload/plan/plan.h"

namespace tandem {

// Whether the options leave the division of the model among several ranks to a plan: they name no
// placement, no grid, no way of rows, no format of experts and no workers, and allow GPUs.
bool leaves_ranks_to_a_plan(const ModelOptions& options);

// The best placement of the model on exactly n GPUs of `machine`: for a server's sequences, or for
// the latency of one. Nothing, and why in `why_not`: none fits, or no ranks of this program run it.
std::optional<PlannedPlacement> plan_for_ranks(const Options& options, const Machine& machine,
                                               int n, bool serves, std::string& why_not);

// A placement in a temporary file, which is removed with this object.
class PlacementFile {
 public:
  explicit PlacementFile(const Placement& placement);
  PlacementFile(const PlacementFile&) = delete;
  PlacementFile& operator=(const PlacementFile&) = delete;
  ~PlacementFile();
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace tandem
