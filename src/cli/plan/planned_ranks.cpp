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
namespace {

// What MPI moves between two ranks of a host, whose messages are copied through memory: measured
// with Open MPI (docs/measurements/ranks.md).
constexpr Link kBetweenRanksOfHost = {.bytes_per_second = 4e9, .latency_seconds = 5e-6};

// One NUMA node's share of n ranks.
NumaNode part_of(const NumaNode& node, int n) {
  return {.cores = node.cores / n,
          .memory_bytes = node.memory_bytes / n,
          .read_bytes_per_second = node.read_bytes_per_second / n};
}

}  // namespace

std::optional<Machine> ranks_as_hosts(const Machine& machine, int n) {
  const int n_nodes = static_cast<int>(machine.nodes.size()), cores = machine.nodes[0].cores;
  const bool alike = std::all_of(machine.nodes.begin(), machine.nodes.end(),
                                 [&](const NumaNode& node) { return node.cores == cores; });
  const int ranks_of_node = std::max(1, n / n_nodes), nodes_of_rank = std::max(1, n_nodes / n);
  if (!alike || ranks_of_node * n_nodes != n * nodes_of_rank || cores % ranks_of_node != 0)
    return {};
  Machine ranks = machine;
  ranks.hosts = n;
  ranks.network = kBetweenRanksOfHost;
  ranks.gpus.clear();
  ranks.n_unmeasured_gpus = 0;
  ranks.sockets = std::max(1, machine.sockets / n);
  ranks.nodes.assign(nodes_of_rank, part_of(machine.nodes[0], ranks_of_node));
  if (nodes_of_rank == 1) ranks.cross_read_bytes_per_second = 0;
  for (double* rate : {&ranks.peak.fp32, &ranks.peak.bf16, &ranks.peak.fp8, &ranks.peak.int8,
                       &ranks.disk_read_bytes_per_second})
    *rate /= n;
  double& one_thread = ranks.one_thread_read_bytes_per_second;
  one_thread = std::min(one_thread, ranks.nodes[0].read_bytes_per_second);
  return ranks;
}

std::optional<Machine> machine_of_ranks(const Machine& machine, DeviceChoice device, int n) {
  if (machine.n_kinds() != 1) return {};
  if (device != DeviceChoice::kCpu && std::ssize(machine.gpus) >= n) {
    Machine ranks = machine;
    ranks.hosts = 1;
    ranks.gpus.resize(n);
    return ranks;
  }
  const bool has_gpus = !machine.gpus.empty() || machine.n_unmeasured_gpus > 0;
  if (device == DeviceChoice::kCuda || (device == DeviceChoice::kAuto && has_gpus)) return {};
  return ranks_as_hosts(machine, n);
}

bool leaves_ranks_to_a_plan(const ModelOptions& o) {
  return o.placement.empty() && o.n_replicas == 0 && o.tp == 0 && o.n_stages == 0 && o.ep == 0 &&
         o.dispatch == ExpertDispatch::kAuto && o.micro_batches == 0 && !o.experts &&
         !o.workers.any();
}

std::optional<PlannedPlacement> plan_for_ranks(const Options& o, const Machine& ranks, int n,
                                               bool serves, std::string& why_not) {
  const ModelConfig config = ModelConfig::from_directory(o.model.directory);
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
                                               .machine = ranks,
                                               .workload = w,
                                               .routing = routing,
                                               .n_ranks = n});
    why_not = why_not_executed(config, ranks, planned.placement);
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
