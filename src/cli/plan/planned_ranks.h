// `--ranks N` where the command line does not say how the ranks divide the model: plan() decides,
// for the first N GPUs or N parts of the cores of this machine as `tandem bench machine` measured
// it.
#pragma once
#include <optional>
#include <string>

#include "cli/options.h"
#include "offload/plan/plan.h"

namespace tandem {

// Whether the options leave the division of the model among several ranks to a plan: they name no
// placement, no grid, no way of rows, no format of experts and no workers.
bool leaves_ranks_to_a_plan(const ModelOptions& options);

// The CPUs of a host as n hosts, of which each has the cores of a rank as share_of() deals them
// (core/topology.h), as much memory, and a network as fast as memory. Nothing where the ranks would
// not be alike.
std::optional<Machine> ranks_as_hosts(const Machine& machine, int n);

// What n ranks of this machine have: its first n GPUs, or its CPUs if `device` says so or it has no
// GPU. Nothing where there are too few GPUs.
std::optional<Machine> machine_of_ranks(const Machine& machine, DeviceChoice device, int n);

// The best placement of the model on all of the n ranks, a GPU of one host or a host each: for a
// server's sequences, or for the latency of one. Nothing, and why in `why_not`: none fits, or no
// ranks of this program run it.
std::optional<PlannedPlacement> plan_for_ranks(const Options& options, const Machine& ranks, int n,
                                               bool serves, std::string& why_not);

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
