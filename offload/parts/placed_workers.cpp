#include "offload/parts/placed_workers.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <set>

#include "core/check.h"
#include "model/cost.h"
#include "offload/plan/placement_json.h"
#include "offload/plan/roles.h"

namespace tandem {
namespace {

DeviceId backbone_of(const Placement& p) { return p.stages[0].devices[0]; }

bool has_workers(const Placement& p, const ExpertGroup& group) {
  return std::any_of(group.owners.begin(), group.owners.end(),
                     [&](DeviceId d) { return !has_backbone(p, d.host); });
}

void require_one_backbone(const Placement& p);
void require_sound(const ModelConfig& config, const Placement& p, const HostKind* host);
void require_whole(const Placement& p);
void require_layers_alike(const Placement& p, const WorkerRole& worker);

}  // namespace

DeviceId worker_called(const Placement& p, const std::string& name, const std::string& this_host) {
  const std::vector<DeviceId> all = worker_devices(p);
  require(!all.empty(), "the placement has no workers: plan for a machine with hosts for them");
  const std::string& called = name.empty() ? this_host : name;
  std::vector<DeviceId> found;
  for (const DeviceId d : all)
    if (device_name(d) == called || fmt::format("host{}", d.host) == called) found.push_back(d);
  const std::string who = name.empty() ? fmt::format("this host is called {}", this_host)
                                       : fmt::format("--host {}", name);
  require(!found.empty(), "{}: the placement has the workers {}: name one of them with --host", who,
          device_names(all));
  require(found.size() == 1, "{}: the placement has the workers {} there: name one with --host",
          who, device_names(found));
  return found[0];
}

PlacedWorker placed_worker(const ModelConfig& config, const Placement& p, DeviceId device) {
  check_with_workers(config, p, nullptr);
  PlacedWorker placed = {device, {}, {}, p.prefill_chunk_tokens};
  for (const WorkerRole& worker : workers_of(p))
    if (worker.device == device) placed.experts = worker.experts;
  std::optional<WeightFormat> format;
  for (const LayerExperts& l : p.layers)
    for (const ExpertGroup& group : l.groups) {
      if (!group.is_on(device)) continue;
      require(!format || group.format == *format,
              "placement: layer {}: expert {} on {} is {} and others there are {}: a worker keeps "
              "its experts in one format",
              l.first, group.experts.front(), device_name(device), format_name(group.format),
              format_name(*format));
      format = group.format;
    }
  if (!device.is_cpu()) {
    require(format == worker_gpu_format(config),
            "placement: the experts on {} are {}: a worker's GPU keeps them as the checkpoint "
            "stores them, or in bf16 where it packs them",
            device_name(device), format_name(*format));
    return placed;
  }
  if (format != stored_expert_format(config)) placed.format = format;
  return placed;
}

void check_with_workers(const ModelConfig& config, const Placement& p, const HostKind* host) {
  require_one_backbone(p);
  require_whole(p);
  require_sound(config, p, host);
  for (const WorkerRole& worker : workers_of(p)) require_layers_alike(p, worker);
}

std::string why_not_run(const ModelConfig& config, const Placement& p) {
  try {
    check_with_workers(config, p, nullptr);
    for (const DeviceId worker : worker_devices(p)) placed_worker(config, p, worker);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

Placement without_workers(const Placement& p) {
  require_one_backbone(p);
  Placement own = p;
  for (LayerExperts& l : own.layers)
    std::erase_if(l.groups, [&](const ExpertGroup& group) { return has_workers(p, group); });
  own.numa_columns = {columns_of_host(p, backbone_of(p).host)};
  own.hosts_of_kinds.clear();
  own.micro_batches = 1;
  own.stream_from_tokens = 0;
  return own;
}

void require_workers_have(const Placement& p, const std::vector<bool>& connected) {
  // Groups of dense layers, which are not checked, may have any numbers.
  const auto is_connected = [&](int e) { return e < std::ssize(connected) && connected[e]; };
  std::set<int> placed, missing, doubled;
  std::vector<DeviceId> owners;
  for (const WorkerRole& worker : workers_of(p)) {
    placed.insert(worker.experts.begin(), worker.experts.end());
    const size_t before = missing.size();
    std::copy_if(worker.experts.begin(), worker.experts.end(),
                 std::inserter(missing, missing.end()), std::not_fn(is_connected));
    if (missing.size() > before) owners.push_back(worker.device);
  }
  require(missing.empty(),
          "placement: experts {} are on {}, and no worker of --workers has them: start it there "
          "with `tandem worker --placement`, and name its address too",
          ranges_text({missing.begin(), missing.end()}), device_names(owners));
  for (const LayerExperts& l : p.layers)
    for (const ExpertGroup& group : l.groups)
      if (!has_workers(p, group) && group.is_on({backbone_of(p).host, -1}))
        std::copy_if(group.experts.begin(), group.experts.end(),
                     std::inserter(doubled, doubled.end()),
                     [&](int e) { return is_connected(e) && placed.count(e) == 0; });
  require(doubled.empty(),
          "placement: experts {} are on the backbone's host, and workers of --workers have them "
          "too: start these with `tandem worker --placement`, or leave them out",
          ranges_text({doubled.begin(), doubled.end()}));
}

namespace {

void require_one_backbone(const Placement& p) {
  std::vector<DeviceId> devices;
  for (const Stage& stage : p.stages)
    devices.insert(devices.end(), stage.devices.begin(), stage.devices.end());
  require(devices.size() == 1,
          "placement: the backbone is on {} devices ({}) and experts are on workers ({}): with "
          "workers this program runs the backbone on one device",
          devices.size(), device_names(devices), device_names(worker_devices(p)));
}

// Slices are for the GPUs of a stage, which add them up.
void require_whole(const Placement& p) {
  for (const LayerExperts& l : p.layers)
    for (const ExpertGroup& group : l.groups)
      require(!group.sliced || group.experts.empty() || !has_workers(p, group),
              "placement: layer {}: expert {} is sliced among {}: a worker has whole experts",
              l.first, group.experts.empty() ? 0 : group.experts.front(),
              device_names(group.owners));
}

// A host with one GPU and more memory than any placement needs.
HostKind host_of_any_size() {
  constexpr int64_t kAny = int64_t{1} << 60;
  HostKind host;
  host.nodes = {{1, kAny, 0}};
  host.gpus = {{.name = "",
                .memory_bytes = kAny,
                .read_bytes_per_second = 0,
                .peak = {},
                .h2d_bytes_per_second = 0,
                .d2h_bytes_per_second = 0,
                .h2d_pageable_bytes_per_second = 0,
                .d2h_pageable_bytes_per_second = 0}};
  return host;
}

// Checks the placement on a machine whose other hosts have any size. All workers are one device of
// the host after the backbone's, since their devices are not known here.
void require_sound(const ModelConfig& config, const Placement& placement, const HostKind* host) {
  const int here = backbone_of(placement).host;
  Machine machine;
  machine.name = "this machine";
  HostKind backbone = host ? *host : host_of_any_size();
  backbone.hosts = 1;
  if (here > 0) {
    static_cast<HostKind&>(machine) = host_of_any_size();
    machine.hosts = here;
    machine.other_kinds.push_back(backbone);
  } else {
    static_cast<HostKind&>(machine) = backbone;
  }
  machine.other_kinds.push_back(host_of_any_size());
  Placement p = placement;
  const std::vector<int> columns = columns_of_host(p, here);
  p.numa_columns.assign(host ? machine.n_kinds() : 0, {});
  if (host) p.numa_columns[here > 0 ? 1 : 0] = columns;
  const auto known = [&](DeviceId d) {
    if (d.host != here) return DeviceId{here + 1, -1};
    return host ? d : DeviceId{here, d.is_cpu() ? -1 : 0};
  };
  for (Stage& stage : p.stages)
    for (DeviceId& d : stage.devices) d = known(d);
  for (LayerExperts& l : p.layers)
    for (ExpertGroup& group : l.groups) {
      std::set<DeviceId> owners;
      for (const DeviceId d : group.owners) owners.insert(known(d));
      group.owners.assign(owners.begin(), owners.end());
    }
  check_placement(config, machine, p);
}

// A process of `tandem worker` has the same experts of every layer. Where the backbone's GPU has
// one, the worker is not asked for it.
void require_layers_alike(const Placement& p, const WorkerRole& worker) {
  const DeviceId backbone = backbone_of(p);
  const std::set<int> experts(worker.experts.begin(), worker.experts.end());
  for (const LayerExperts& l : p.layers)
    for (const ExpertGroup& group : l.groups) {
      if (group.is_on(worker.device) || (!backbone.is_cpu() && group.is_on(backbone))) continue;
      const auto e = std::find_if(group.experts.begin(), group.experts.end(),
                                  [&](int expert) { return experts.count(expert) > 0; });
      require(e == group.experts.end(),
              "placement: layer {}: expert {} is on {}, and in other layers on {}: a worker has "
              "the same experts of every layer, but for those on the backbone's GPU",
              l.first, e == group.experts.end() ? 0 : *e, device_names(group.owners),
              device_name(worker.device));
    }
}

}  // namespace
}  // namespace tandem
