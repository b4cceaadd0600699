// Placements whose experts are computed by workers, which are hosts without a part of the backbone:
// who is what, what the requests cost, from which batch on workers pay, and which hosts replace
// lost workers (docs/standbys.md). Pure.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "offload/plan/plan.h"

namespace tandem {

struct WorkerRole {
  DeviceId device;           // CPUs, or a GPU
  std::vector<int> experts;  // of any layer, ascending: a worker has the same ones of every layer
};

std::vector<WorkerRole> workers_of(const Placement& placement);  // by device

struct Roles {
  std::vector<int> backbone_hosts;
  std::vector<WorkerRole> workers;  // by device

  // Times of one MoE layer in a decode step.
  double request_seconds = 0;  // of all requests, without rows and the network's latency
  double round_trip_seconds = 0;
  double expert_seconds = 0;  // of the experts of CPUs or, if GPUs are workers, of GPUs
  bool request_is_measured = false;

  // The plan for the backbone's hosts alone; empty if the model does not fit them.
  std::optional<Prediction> alone;
  // The fewest sequences from which a decode step is faster than alone, ignoring memory for their
  // caches; 0: none up to kMostSequences.
  int pays_from = 0;

  // More workers like the first one than this wait longer for round trips than for experts; 0: no
  // number up to most_useful_ep() does.
  int most_workers = 0;
  double one_expert_seconds = 0;  // reading one, the bound of any number of workers
};

constexpr int kMostSequences = 4096;

// Empty unless the placement has workers.
std::optional<Roles> roles_of(const PlanRequest& request, const Placement& placement,
                              const Prediction& prediction);

// With what the commands of commands_of() do not do of the placement.
std::vector<std::string> roles_in_words(const PlanRequest& request, const Roles& roles,
                                        const Placement& placement, const Prediction& prediction);

// How to start them: `tandem worker` for each worker and standby, then `tandem serve`. They name
// the placement's file where there is one and tandem executes the placement, else experts and
// formats.
std::vector<std::string> commands_of(const PlanRequest& request, const Roles& roles,
                                     const Placement& placement, const std::vector<int>& standbys);

// Experts with the same owners, all of which are workers' CPUs: what a standby loads when it has
// none left. It cannot replace a GPU, whose sums have other bits.
struct WorkerShard {
  std::vector<int> experts;  // ascending; of every layer
  std::vector<int> hosts;    // ascending
  int64_t bytes = 0;
};
std::vector<WorkerShard> worker_shards(const ModelConfig& config, const Placement& placement);

// Bytes of the largest of them.
int64_t largest_shard_bytes(const std::vector<WorkerShard>& shards);

// plan_placement() with `request.n_standbys` hosts of one kind, the last ones, set aside: of the
// kind without whose hosts the plan is best, among those whose memory has room for any shard.
// Throws Error where there is none, or no worker.
PlannedPlacement plan_with_standbys(const PlanRequest& request);
std::string standby_in_words(const PlanRequest& request, const Placement& placement, int standby);

// "host3 (memory box)"
std::string name_of_host(const Machine& machine, int host);
// A machine of `n` hosts of one kind.
Machine hosts_alone(const Machine& machine, int kind, int n);

}  // namespace tandem
