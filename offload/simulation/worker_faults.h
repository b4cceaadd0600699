// Simulates decoding with workers that fail and come back, with the rules of docs/roles.md and
// docs/standbys.md: what a plan with workers still reaches then, and how long answers stand still.
// Pure.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "offload/plan/predict.h"

namespace tandem {

enum class WorkerFault {
  kKilled,   // noticed at once; the layer that is being computed is asked of others
  kHung,     // noticed after the deadline of beats
  kDrained,  // answers what it has first
};
const char* name_of(WorkerFault fault);  // "killed"

struct FaultOptions {
  int n_faults = 20;
  double mean_interval_seconds = 600;  // between faults, exponentially distributed
  double deadline_seconds = 0.5;       // serve --worker-deadline
  double patience_seconds = 10;        // serve --worker-patience
  // From the end of a worker until it is started again, without loading. One that hangs ends by
  // itself after the time that workers have for progress.
  double restart_seconds = 5, hung_seconds = 60;
  // Hosts that load the experts of a lost worker where no other has them, and do not fail.
  std::vector<int> standbys = {};
  uint64_t seed = 1;
};

struct SimulatedFault {
  double at = 0;  // seconds from the start
  int host = 0;
  WorkerFault fault = WorkerFault::kKilled;
  double back_at = 0;       // it answers again
  double step_seconds = 0;  // of a decode step without it; 0: no other worker has its experts
  // The host that was the last one to be asked to load them, and when it has; -1: none was.
  int standby = -1;
  double loaded_at = 0;
};

struct FaultRun {
  std::vector<SimulatedFault> faults;
  double seconds = 0;
  double tokens_per_second = 0, without_faults = 0;
  double longest_gap_seconds = 0, p99_gap_seconds = 0;  // between tokens of an answer
  int n_lost = 0;  // answers that ended with an error, because no owner was back in time
  std::vector<double> tokens_each_second;  // tokens of every second, for a picture
};

// Workers fail one at a time or several at once, the backbone does not. Throws Error unless the
// placement has workers, and for numbers out of range.
FaultRun simulate_faults(const PlanInput& input, const Placement& placement,
                         const FaultOptions& options);

}  // namespace tandem
