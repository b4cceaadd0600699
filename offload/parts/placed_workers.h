// Placements that name workers: what each `tandem worker` has of one, and what is left to the host
// with the backbone. Pure.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "offload/plan/placement.h"

namespace tandem {

// What one process of `tandem worker` has.
struct PlacedWorker {
  DeviceId device;
  std::vector<int> experts;            // ascending; the same ones of every layer
  std::optional<WeightFormat> format;  // in its memory; empty: as stored
  int max_rows;                        // of a request: tokens of a step of the backbone
};

// The worker that `name` says: a host ("host1"), or one of several workers on a host
// ("host1.gpu0"). Without a name it is the worker on the host that is called `this_host`. Throws
// Error that lists the workers where that is none, or several.
DeviceId worker_called(const Placement& placement, const std::string& name,
                       const std::string& this_host);

// Throws Error for what check_with_workers() refuses, and for a worker with experts in
// several formats, or on a GPU in another one than worker_gpu_format().
PlacedWorker placed_worker(const ModelConfig& config, const Placement& placement, DeviceId worker);

// Throws Error for a placement that is not sound, and for one that a backbone with workers does not
// run: a backbone on several devices, experts that a worker has in some layers only, though the
// backbone's GPU does not have them in the others, or slices of experts. `host` is that of the
// backbone, which is checked for memory; null: it is not this one.
void check_with_workers(const ModelConfig& config, const Placement& placement,
                        const HostKind* host);

// What placed_worker() and check_with_workers() refuse of a placement, in one line; empty: nothing.
std::string why_not_run(const ModelConfig& config, const Placement& placement);

// What the backbone's host runs of such a placement: all but the groups that workers have, in whole
// steps and without streaming. Hosts keep their numbers, and numa_columns are those of this host.
// Throws Error for a backbone on several devices.
Placement without_workers(const Placement& placement);

// connected: [n_experts] those that the connected workers have. Throws Error if experts that the
// placement gives to workers are missing, or others are there that the backbone's CPU keeps.
void require_workers_have(const Placement& placement, const std::vector<bool>& connected);

}  // namespace tandem
