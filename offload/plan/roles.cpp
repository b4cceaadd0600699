#include "offload/plan/roles.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>

#include "core/check.h"
#include "core/memory.h"
#include "core/rounding.h"
#include "model/cost.h"
#include "offload/plan/layer_time.h"
#include "offload/plan/placement_json.h"
#include "offload/plan/reasons.h"

namespace tandem {
namespace {

std::vector<int> hosts_of_backbone(const Machine& m, const Placement& p) {
  std::vector<int> hosts;
  for (int host = 0; host < m.n_hosts(); ++host)
    if (has_backbone(p, host)) hosts.push_back(host);
  return hosts;
}

double decode_seconds(const PlanRequest& r, const Machine& machine, const Placement& p, int n) {
  Workload w = r.workload;
  w.concurrency = n;
  return predict({r.config, machine, w, r.routing}, p).decode.step_seconds;
}

// By powers of two.
int least_that_pays(const PlanRequest& r, const Placement& p, const Machine& machine_alone,
                    const Placement& placement_alone) {
  for (int n = 1; n <= kMostSequences; n *= 2)
    if (decode_seconds(r, r.machine, p, n) < decode_seconds(r, machine_alone, placement_alone, n))
      return n;
  return 0;
}

Part experts_of(DeviceId worker) { return worker.is_cpu() ? Part::kCpuExperts : Part::kGpuExperts; }

// The least number of workers like the first one whose round trips take longer than the experts:
// each has an even part of the experts and a host of its own.
void size_workers(const PlanRequest& r, const Placement& p, Roles& roles) {
  const Machine& m = r.machine;
  const DeviceId worker = roles.workers.front().device;
  const int kind = m.kind_of(worker.host);
  roles.one_expert_seconds =
      one_expert_read_seconds(r.config, rates_of(m, worker, p.numa_columns).read_bytes_per_second);
  const WeightFormat format = p.layers[0].groups[0].format;
  const RoutingStatistics even(r.config);
  // As hosts of a kind of their own, so that all others keep their numbers.
  const auto waits = [&](int n) {
    Machine more = m;
    more.other_kinds.push_back(m.of_kind(kind));
    more.other_kinds.back().hosts = n;
    more.between_kinds = m.link(roles.backbone_hosts.front(), worker.host);
    Placement with = p;
    if (!p.numa_columns.empty()) with.numa_columns.push_back(p.numa_columns[kind]);
    ExpertHosts hosts;
    for (int i = 0; i < n; ++i) hosts.devices.push_back({m.n_hosts() + i, worker.gpu});
    hosts.speeds.assign(n, 1);
    hosts.slots.assign(n, r.config.router.n_experts);
    const PlanInput in = {r.config, more, r.workload, even};
    with.layers = layers_on_hosts(in, hosts, format, 0);
    const LayerTime t = predict(in, with).decode.moe;
    return t[Part::kExchange] >= t[experts_of(worker)];
  };
  const int most = std::min(most_useful_ep(r.config), r.config.router.n_experts);
  const int least = least_where(1, most + 1, waits);
  roles.most_workers = least > most ? 0 : least;
}

}  // namespace

std::vector<WorkerRole> workers_of(const Placement& p) {
  std::vector<WorkerRole> workers;
  for (const DeviceId device : worker_devices(p)) {
    std::set<int> experts;
    for (const LayerExperts& l : p.layers)
      for (const ExpertGroup& group : l.groups)
        if (group.is_on(device)) experts.insert(group.experts.begin(), group.experts.end());
    workers.push_back({device, {experts.begin(), experts.end()}});
  }
  return workers;
}

std::string name_of_host(const Machine& m, int host) {
  const std::string& label = m.host(host).label;
  return label.empty() ? fmt::format("host{}", host) : fmt::format("host{} ({})", host, label);
}

Machine hosts_alone(const Machine& machine, int kind, int n) {
  Machine m = machine;
  static_cast<HostKind&>(m) = machine.of_kind(kind);
  m.hosts = n;
  m.other_kinds.clear();
  return m;
}

std::optional<Roles> roles_of(const PlanRequest& r, const Placement& p, const Prediction& now) {
  Roles roles;
  roles.backbone_hosts = hosts_of_backbone(r.machine, p);
  roles.workers = workers_of(p);
  if (roles.workers.empty()) return {};
  roles.request_is_measured = r.machine.request_seconds > 0;
  const double request = roles.request_is_measured ? r.machine.request_seconds : kRequestSeconds;
  roles.request_seconds = requests_seconds(request, static_cast<int>(roles.workers.size()));
  roles.round_trip_seconds = now.decode.moe[Part::kExchange];
  for (const WorkerRole& worker : roles.workers)
    roles.expert_seconds =
        std::max(roles.expert_seconds, now.decode.moe[experts_of(worker.device)]);
  const Machine without = hosts_alone(r.machine, r.machine.kind_of(roles.backbone_hosts.front()),
                                      static_cast<int>(roles.backbone_hosts.size()));
  try {
    const PlannedPlacement plan =
        plan_placement({r.model_name, r.config, without, r.workload, r.routing});
    roles.alone = plan.prediction;
    roles.pays_from = least_that_pays(r, p, without, plan.placement);
  } catch (const Error&) {  // it does not fit
    roles.alone.reset();
  }
  size_workers(r, p, roles);
  return roles;
}

namespace {

// Names each worker, or the first of more than kMostNamed successive workers that are alike.
std::string workers_in_words(const Machine& m, const std::vector<WorkerRole>& workers) {
  constexpr std::ptrdiff_t kMostNamed = 4;
  const auto name = [&](const WorkerRole& w) { return name_of_host(m, w.device.host); };
  const auto where = [](const WorkerRole& w) { return w.device.is_cpu() ? "" : " on a GPU"; };
  std::string text;
  for (auto worker = workers.begin(); worker < workers.end();) {
    const auto end = std::find_if(worker, workers.end(), [&](const WorkerRole& other) {
      return other.device.is_cpu() != worker->device.is_cpu() ||
             other.experts.size() != worker->experts.size() ||
             m.kind_of(other.device.host) != m.kind_of(worker->device.host);
    });
    if (end - worker > kMostNamed)
      text += fmt::format("; {} and {} more are workers with {} experts each{}", name(*worker),
                          end - worker - 1, worker->experts.size(), where(*worker));
    else
      for (auto one = worker; one < end; ++one)
        text += fmt::format("; {} is a worker with {} experts{}", name(*one), one->experts.size(),
                            where(*one));
    worker = end;
  }
  return text;
}

// Why `tandem worker` and `tandem serve` refuse the placement.
std::vector<std::string> not_executed(const PlanRequest& r, const Roles& roles,
                                      const Placement& p) {
  std::vector<std::string> words;
  const bool on_gpu = std::any_of(roles.workers.begin(), roles.workers.end(),
                                  [](const WorkerRole& w) { return !w.device.is_cpu(); });
  const WeightFormat format = p.layers[0].groups[0].format;
  if (on_gpu && format != worker_gpu_format(r.config))
    words.push_back(
        fmt::format("not executed: a worker's GPU keeps experts as the checkpoint stores them, or "
                    "in bf16 where it packs them, and not in {}",
                    format_name(format)));
  const DeviceId backbone = p.stages[0].devices[0];
  for (const LayerExperts& l : p.layers)
    for (const ExpertGroup& group : l.groups)
      if (words.empty() && !backbone.is_cpu() && group.owners[0] == backbone &&
          group.format != stored_expert_format(r.config))
        words.push_back(
            fmt::format("not executed: the backbone's GPU keeps experts as the checkpoint stores "
                        "them, and not in {}",
                        format_name(group.format)));
  size_t n_devices = 0;
  for (const Stage& stage : p.stages) n_devices += stage.devices.size();
  if (n_devices > 1)
    words.push_back(
        fmt::format("not executed: `tandem serve` has its backbone on one device beside workers, "
                    "not on {}; the command starts it on the first",
                    n_devices));
  const std::string why = words.empty() && r.why_not_run ? r.why_not_run(p) : "";
  if (!why.empty()) words.push_back("not executed: " + why);
  return words;
}

// What they leave out.
std::vector<std::string> left_out(const Placement& p) {
  std::vector<std::string> words;
  std::set<int> doubled;
  for (const LayerExperts& l : p.layers)
    for (const ExpertGroup& group : l.groups) {
      const auto n = std::count_if(group.owners.begin(), group.owners.end(),
                                   [&](DeviceId d) { return has_backbone(p, d.host); });
      if (n > 0 && n < std::ssize(group.owners))
        doubled.insert(group.experts.begin(), group.experts.end());
    }
  if (!doubled.empty())
    words.push_back(fmt::format(
        "left out: the backbone's host does not compute the {} experts that workers have too",
        doubled.size()));
  if (p.stream_from_tokens > 0)
    words.push_back("left out: beside workers no experts are streamed to the backbone's GPU");
  return words;
}

}  // namespace

std::vector<std::string> roles_in_words(const PlanRequest& r, const Roles& roles,
                                        const Placement& p, const Prediction& now) {
  const Machine& m = r.machine;
  std::vector<std::string> words;
  std::string text =
      fmt::format("roles: {}{} the backbone", name_of_host(m, roles.backbone_hosts.front()),
                  roles.backbone_hosts.size() > 1
                      ? fmt::format(" and {} more have", roles.backbone_hosts.size() - 1)
                      : " has");
  words.push_back(text + workers_in_words(m, roles.workers));
  words.push_back(fmt::format(
      "requests to {} worker(s) take {:.3f} ms a layer, of which {:.3f} ms are the cost of {} "
      "requests{}; the experts take {:.3f} ms",
      roles.workers.size(), milli(roles.round_trip_seconds), milli(roles.request_seconds),
      roles.workers.size(),
      roles.request_is_measured ? " (measured)"
                                : " (assumed: `tandem bench comm --out` measures it)",
      milli(roles.expert_seconds)));
  if (!roles.alone)
    words.push_back(fmt::format(
        "without workers the model does not fit {}",
        roles.backbone_hosts.size() > 1 ? "the backbone's hosts" : "the backbone's host"));
  else if (roles.pays_from > 0)
    words.push_back(fmt::format(
        "workers pay from {} sequence(s) on: {:.2f} ms a step of {}, {:.2f} without them",
        roles.pays_from, milli(now.decode.step_seconds), r.workload.concurrency,
        milli(roles.alone->decode.step_seconds)));
  else
    words.push_back(
        fmt::format("workers do not make decoding faster with up to {} sequences", kMostSequences));
  words.push_back(fmt::format(
      "no number of workers is faster than reading one expert, {:.1f} us, and a round trip; {}",
      roles.one_expert_seconds * 1e6,
      roles.most_workers > 0
          ? fmt::format("from {} hosts like {} on round trips take longer than experts",
                        roles.most_workers, name_of_host(m, roles.workers[0].device.host))
          : fmt::format("up to {} workers, experts take longer than round trips",
                        r.config.router.n_experts)));
  for (std::string& what : not_executed(r, roles, p)) words.push_back(std::move(what));
  for (std::string& what : left_out(p)) words.push_back(std::move(what));
  return words;
}

namespace {

// What makes this GPU the first one that a process sees: nothing where the host has no other.
std::string chosen_gpu(const Machine& m, DeviceId d) {
  return d.is_cpu() || m.host(d.host).gpus.size() == 1
             ? ""
             : fmt::format("CUDA_VISIBLE_DEVICES={} ", d.gpu);
}

// What a worker has: of the placement's file, or in numbers.
std::string asked_of_worker(const PlanRequest& r, const Roles& roles, const WorkerRole& worker,
                            const std::string& kept) {
  const DeviceId d = worker.device;
  if (r.placement_file.empty())  // a GPU keeps experts as they are stored
    return fmt::format("{} --experts {}{}", d.is_cpu() ? "" : " --device cuda",
                       ranges_text(worker.experts), d.is_cpu() ? kept : "");
  const auto n = std::count_if(roles.workers.begin(), roles.workers.end(),
                               [&](const WorkerRole& w) { return w.device.host == d.host; });
  return fmt::format(" --placement {} --host {}", r.placement_file,
                     n > 1 ? device_name(d) : fmt::format("host{}", d.host));
}

std::string asked_of_backbone(const PlanRequest& r, const Placement& p, WeightFormat format) {
  const char* const device = p.stages[0].devices[0].is_cpu() ? " --device cpu" : " --device cuda";
  if (!r.placement_file.empty()) return fmt::format("{} --placement {}", device, r.placement_file);
  return device + (format == stored_expert_format(r.config)
                       ? ""
                       : fmt::format(" --experts {}", format_name(format)));
}

}  // namespace

std::vector<std::string> commands_of(const PlanRequest& request, const Roles& roles,
                                     const Placement& p, const std::vector<int>& standbys) {
  constexpr int kFirstPort = 9000;
  PlanRequest r = request;
  if (!not_executed(r, roles, p).empty()) r.placement_file.clear();
  const WeightFormat format = p.layers[0].groups[0].format;
  const std::string kept = format == stored_expert_format(r.config)
                               ? ""
                               : fmt::format(" --format {}", format_name(format));
  std::vector<std::string> commands, addresses;
  std::map<int, int> n_of_host;
  const auto add = [&](DeviceId d, const std::string& asked) {
    addresses.push_back(fmt::format("host{}:{}", d.host, kFirstPort + n_of_host[d.host]++));
    commands.push_back(fmt::format("host{}: {}tandem worker {}{} --listen {} --worker-secret KEY",
                                   d.host, chosen_gpu(r.machine, d), r.model_name, asked,
                                   addresses.back()));
  };
  for (const WorkerRole& worker : roles.workers)
    add(worker.device, asked_of_worker(r, roles, worker, kept));
  const std::string rows = r.placement_file.empty()  // a placement's steps may have more
                               ? ""
                               : fmt::format(" --chunk {}", p.prefill_chunk_tokens);
  for (const int host : standbys)
    add({host, -1}, fmt::format(" --experts standby{}{}", kept, rows));
  commands.push_back(
      fmt::format("host{}: tandem serve {} --workers {}{} --ctx {} --worker-secret KEY",
                  roles.backbone_hosts.front(), r.model_name, fmt::join(addresses, ","),
                  asked_of_backbone(r, p, format), r.workload.context));
  return commands;
}

std::vector<WorkerShard> worker_shards(const ModelConfig& c, const Placement& p) {
  const std::vector<int> workers = worker_hosts(p);
  const auto is_worker = [&](DeviceId d) {
    return d.is_cpu() && std::binary_search(workers.begin(), workers.end(), d.host);
  };
  std::map<int, std::set<int>> owners;  // of experts that have only workers in some layer
  int64_t bytes = 0;                    // of an expert in all layers
  for (const LayerExperts& l : p.layers)
    for (const ExpertGroup& group : l.groups)
      if (std::all_of(group.owners.begin(), group.owners.end(), is_worker))
        for (const int e : group.experts)
          for (const DeviceId d : group.owners) owners[e].insert(d.host);
  for (int l = 0; l < c.n_layers; ++l)
    if (c.is_moe(l)) bytes += routed_expert_bytes(c, p.layers[0].groups[0].format);
  std::map<std::set<int>, WorkerShard> shards;
  for (const auto& [expert, hosts] : owners) {
    WorkerShard& shard = shards[hosts];
    shard.experts.push_back(expert);
    shard.hosts.assign(hosts.begin(), hosts.end());
    shard.bytes += bytes;
  }
  std::vector<WorkerShard> all;
  for (auto& [hosts, shard] : shards) all.push_back(std::move(shard));
  return all;
}

int64_t largest_shard_bytes(const std::vector<WorkerShard>& shards) {
  int64_t most = 0;
  for (const WorkerShard& shard : shards) most = std::max(most, shard.bytes);
  return most;
}

namespace {

Machine without_last_hosts(const Machine& machine, int kind, int n) {
  Machine m = machine;
  m.of_kind(kind).hosts -= n;
  if (m.of_kind(kind).hosts > 0) return m;
  if (kind == 0) static_cast<HostKind&>(m) = HostKind(m.other_kinds[0]);
  m.other_kinds.erase(m.other_kinds.begin() + std::max(0, kind - 1));
  return m;
}

// The same placement where `n` hosts, from `first` on, come before some of its hosts.
Placement with_hosts_between(Placement p, int first, int n) {
  const auto move = [&](std::vector<DeviceId>& devices) {
    for (DeviceId& d : devices)
      if (d.host >= first) d.host += n;
  };
  for (Stage& s : p.stages) move(s.devices);
  for (LayerExperts& l : p.layers)
    for (ExpertGroup& group : l.groups) move(group.owners);
  return p;
}

}  // namespace

PlannedPlacement plan_with_standbys(const PlanRequest& r) {
  const Machine& m = r.machine;
  const int n = r.n_standbys;
  require(n > 0 && n < m.n_hosts(),
          "--standbys {}: must be at least 0 and less than the {} host(s) of {}", n, m.n_hosts(),
          m.name);
  std::optional<PlannedPlacement> best;
  std::string refusal = fmt::format("no kind has so many hosts of {}", m.name);
  for (int kind = 0; kind < m.n_kinds(); ++kind) {
    if (m.of_kind(kind).hosts < n) continue;
    const Machine rest = without_last_hosts(m, kind, n);
    const int first = m.first_host_of(kind) + m.of_kind(kind).hosts - n;
    PlannedPlacement plan;
    try {
      plan = plan_placement({r.model_name, r.config, rest, r.workload, r.routing});
    } catch (const Error& error) {
      refusal = error.what();
      continue;
    }
    plan.placement = with_hosts_between(std::move(plan.placement), first, n);
    plan.placement.machine = m.name;
    plan.placement.hosts_of_kinds = hosts_of_kinds(m);
    NumaColumns& columns = plan.placement.numa_columns;
    if (!columns.empty() && std::ssize(columns) < m.n_kinds())
      columns.insert(columns.begin() + kind, std::vector<int>{});
    plan.prediction = predict({r.config, m, plan.workload, r.routing}, plan.placement);
    for (int i = 0; i < n; ++i) plan.standbys.push_back(first + i);
    const std::vector<WorkerShard> shards = worker_shards(r.config, plan.placement);
    if (shards.empty()) {
      refusal = fmt::format("a plan for the other hosts has no experts that only workers have");
      continue;
    }
    const int64_t bytes = largest_shard_bytes(shards), capacity = m.of_kind(kind).memory_bytes();
    const int64_t room = capacity - reserved_bytes(capacity, true);
    if (bytes > room) {
      refusal = fmt::format("{} has {:.1f} GB for the {:.1f} GB that a worker may lose",
                            name_of_host(m, first), gigabytes(room), gigabytes(bytes));
      continue;
    }
    const bool fast = meets(plan.workload, plan.prediction);
    const bool other_fast = best && meets(best->workload, best->prediction);
    if (!best || (fast != other_fast ? fast : plan.prediction.score < best->prediction.score))
      best = std::move(plan);
  }
  require(best.has_value(), "--standbys {}: {}; ask for fewer, or leave it out", n, refusal);
  return std::move(*best);
}

std::string standby_in_words(const PlanRequest& r, const Placement& p, int standby) {
  const int64_t bytes = largest_shard_bytes(worker_shards(r.config, p));
  const double rate = r.machine.host(standby).disk_read_bytes_per_second;
  return fmt::format("standby: {} loads what a lost worker had, at most {:.1f} GB{}",
                     name_of_host(r.machine, standby), gigabytes(bytes),
                     rate > 0 ? fmt::format(", in {:.1f} s", static_cast<double>(bytes) / rate)
                              : "; the speed of its disk is not known");
}

}  // namespace tandem
