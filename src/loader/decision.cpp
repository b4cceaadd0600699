#include "loader/decision.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "core/check.h"
#include "loader/weights/mtp_layers.h"
#include "loader/weights/pack_weights.h"
#include "loader/weights/spare_experts.h"
#include "offload/balance/hot_experts.h"
#include "offload/parts/placed_workers.h"
#include "offload/plan/placement_json.h"
#include "offload/ranks/exchanged_experts.h"
#include "offload/ranks/rank_experts.h"
#include "offload/workers/shards.h"
#include "ops/cpu_ops.h"
#include "scheduling/kv_cache.h"

namespace tandem {
namespace {

bool has_gpu(const ModelOptions& options) {
  if (options.device != DeviceChoice::kAuto) return options.device == DeviceChoice::kCuda;
  const std::string why_not = why_no_gpu();
  if (!why_not.empty()) options.warn(fmt::format("running on the CPU: {}", why_not));
  return why_not.empty();
}

// The parts of this machine's description that decide whether a placement fits.
Machine machine_of(const Subject& subject, bool with_gpu) {
  Machine machine;
  machine.name = "this machine";
  const auto [rank, n_ranks, n_of_host] = subject.rank;
  const bool two_kinds = are_of_two_kinds(subject.on_gpu);  // what other hosts have is not known
  machine.hosts = with_gpu && !two_kinds ? std::max(n_ranks / n_of_host, 1) : n_ranks;
  const Topology& topology = subject.topology;
  for (const TopologyNode& node : topology.nodes)
    machine.nodes.push_back(
        {static_cast<int>(node.cpus.size()), subject.memory_bytes / topology.n_nodes(), 0});
  if (two_kinds)
    machine.gpus.assign(n_ranks, with_gpu ? this_gpu() : Gpu());
  else if (with_gpu)
    machine.gpus.assign(n_ranks > 1 ? n_of_host : 1, this_gpu());
  return machine;
}

// Whether the ranks are replicas of the backbone that use workers: each has links of its own, and
// what no worker has.
bool are_replicas_with_workers(const Subject& subject, BackboneGrid grid) {
  return !subject.on_workers.empty() && grid.n_replicas > 1;
}

// Whether this process has links to workers.
bool uses_workers(const Subject& subject, BackboneGrid grid) {
  return !subject.on_workers.empty() &&
         (subject.rank.rank == 0 || are_replicas_with_workers(subject, grid));
}

// Which ranks of this one's replica compute on GPUs; empty: all alike.
std::vector<bool> gpus_of_replica(const Subject& subject, BackboneGrid grid) {
  if (subject.on_gpu.empty()) return {};
  const int rank = subject.rank.rank;
  const auto first = subject.on_gpu.begin() + rank - grid.part_of(rank);
  return {first, first + grid.tp};
}

// What of the backbone this rank has. GPUs divide it where a replica has some: the CPUs beside them
// have experts, which take less time to compute there than to send to a GPU.
BackboneShare share_of(const Subject& subject, const ExecutedParts& parts) {
  const int rank = subject.rank.rank;
  const BackboneGrid grid = parts.grid;
  const StageLayers layers = grid.n_stages > 1 ? parts.stages[grid.stage_of(rank)] : kAllLayers;
  const std::vector<bool> gpus = gpus_of_replica(subject, grid);
  if (are_of_two_kinds(gpus))
    return share_of_rank(subject.config, grid.part_of(rank), gpus, layers);
  if (parts.by_replicas.any())
    return share_among_replicas(subject.config, rank, grid, parts.by_replicas, layers);
  return share_of_rank(subject.config, grid.part_of(rank), grid.tp, layers);
}

// What the other ranks have and this one does not. Experts of workers count as the first rank's.
Elsewhere on_other_ranks(const Subject& subject, const ExecutedParts& parts) {
  const BackboneGrid grid = parts.grid;
  if (subject.rank.n_ranks == 1 || are_replicas_with_workers(subject, grid)) return {};
  return elsewhere_of(owners_of(parts.ranks_of_expert, subject.config, grid.n_of_stage()),
                      subject.config, grid.in_stage(subject.rank.rank), share_of(subject, parts));
}

// The ranks as the options divide them among pipeline stages and replicas of the backbone.
BackboneGrid asked_grid(const ModelOptions& options, const Subject& subject) {
  const int n = subject.rank.n_ranks;
  const int n_stages = std::max(options.n_stages, 1);
  const int n_of_stage = std::max(n / n_stages, 1);
  const int n_replicas = options.n_replicas > 0 ? options.n_replicas
                         : options.tp > 0       ? std::max(n_of_stage / options.tp, 1)
                                                : 1;
  const int tp = options.tp > 0 ? options.tp : std::max(n_of_stage / n_replicas, 1);
  const BackboneGrid grid = {n_replicas, tp, n_stages};
  require(grid.n_ranks() == n,
          "--dp {} --tp {} --pp {}: that many replicas, ranks of each and pipeline stages are {} "
          "ranks, and there are {}: leave one of the numbers out, or start {} ranks",
          n_replicas, tp, n_stages, grid.n_ranks(), n, grid.n_ranks());
  require(options.ep == 0 || options.ep == n_of_stage,
          "--ep {}: all {} ranks{} divide the experts: leave it out", options.ep, n_of_stage,
          n_stages > 1 ? " of a stage" : "");
  require(n_stages <= subject.config.n_layers, "--pp {}: the model has {} layers: ask for fewer",
          n_stages, subject.config.n_layers);
  return grid;
}

// As many layers for each stage.
std::vector<StageLayers> even_stages(int n_layers, int n_stages) {
  std::vector<StageLayers> stages;
  for (int i = 0; i < n_stages; ++i) {
    const int first = n_layers * i / n_stages;
    stages.push_back({first, n_layers * (i + 1) / n_stages - first});
  }
  return stages;
}

// The workers of a placement, and no others, are connected.
void require_workers_as_placed(const ModelOptions& options, const Subject& subject,
                               const Placement& placement) {
  const std::string workers = device_names(worker_devices(placement));
  if (subject.on_workers.empty()) {
    require(workers.empty(),
            "{} has experts on workers ({}): start `tandem worker --placement {}` there, and name "
            "their addresses with --workers",
            options.placement, workers, options.placement);
    return;
  }
  require(!workers.empty(), "--workers: {} has no experts on workers: leave one of them out",
          options.placement);
  const auto layer = std::find_if(subject.on_workers.begin(), subject.on_workers.end(),
                                  [](const std::vector<bool>& of) { return !of.empty(); });
  require_workers_have(placement, *layer);
}

// The devices of a placement that name GPUs are those of ranks that follow each other on hosts.
void require_ranks_in_order(const Subject& subject, const std::string& placement) {
  const std::vector<int>& hosts = subject.host_of_rank;
  require(std::is_sorted(hosts.begin(), hosts.end()),
          "{} places parts on the GPUs of hosts, whose ranks do not follow each other: start them "
          "with --map-by slot instead of --map-by node",
          placement);
}

std::optional<ExecutedParts> placed_parts(const ModelOptions& options, const Subject& subject,
                                          bool with_gpu) {
  if (options.placement.empty()) return {};
  require(
      !options.experts,
      "both --placement and --experts {}: the placement sets the format of experts; leave one out",
      options.experts ? format_name(*options.experts) : "");
  const Placement placement = placement_from_file(options.placement);
  if (with_gpu || are_of_two_kinds(subject.on_gpu))
    require_ranks_in_order(subject, options.placement);
  ExecutedParts parts =
      executed_parts(subject.config, machine_of(subject, with_gpu), placement, subject.rank);
  if (subject.rank.n_ranks == 1) require_workers_as_placed(options, subject, placement);
  if (subject.rank.n_ranks > 1 && !parts.gpu)
    parts.experts.keep_elsewhere(on_other_ranks(subject, parts));
  require(options.n_replicas == 0 || options.n_replicas == parts.grid.n_replicas,
          "--dp {}: {} has {} replicas of the backbone: leave --dp out", options.n_replicas,
          options.placement, parts.grid.n_replicas);
  require(options.tp == 0 || options.tp == parts.grid.tp,
          "--tp {}: {} divides the backbone by {}: leave --tp out", options.tp, options.placement,
          parts.grid.tp);
  require(options.n_stages == 0 || options.n_stages == parts.grid.n_stages,
          "--pp {}: {} has {} pipeline stages: leave --pp out", options.n_stages, options.placement,
          parts.grid.n_stages);
  require(parts.micro_batches == 0 || options.micro_batches == 0 ||
              options.micro_batches == parts.micro_batches,
          "--micro-batches {}: {} has {} micro-batches: leave --micro-batches out",
          options.micro_batches, options.placement, parts.micro_batches);
  require(parts.gpu.has_value() == with_gpu,
          "--device {}: the backbone of {} is on the CPU: use --device cpu",
          name_of(options.device), options.placement);
  return parts;
}

int64_t chosen_context(const ModelOptions& options, const ModelConfig& config,
                       const std::optional<ExecutedParts>& placed) {
  require(options.context >= 0 && options.context <= (int64_t{1} << 30),
          "--ctx {}: must be between 1 and 2^30", options.context);
  require(!placed || options.context <= placed->kv_tokens,
          "--ctx {}: {} reserves {} tokens of KV cache: lower --ctx, or raise the placement's kv "
          "tokens",
          options.context, options.placement, placed ? placed->kv_tokens : 0);
  if (options.context > 0) return options.context;
  return placed ? placed->kv_tokens : default_context(config);
}

// The cache type on a GPU: as placed, else BF16 because FP8 costs some accuracy.
DType gpu_cache_type(const ModelOptions& options, const std::optional<ExecutedParts>& placed) {
  if (!options.kv) return placed ? placed->kv_type : DType::kBF16;
  require(!placed || placed->kv_type == *options.kv,
          "both --placement and --kv {}: {} has another type of KV cache; leave --kv out",
          format_name({*options.kv}), options.placement);
  return *options.kv;
}

StepLimits step_limits(const ModelOptions& options, int64_t context,
                       const std::optional<ExecutedParts>& placed) {
  const int most = placed ? placed->chunk_tokens : kMaxStepTokens;
  const int chunk = options.step_tokens.value_or(placed ? most : kStepTokens);
  if (chunk > most)
    options.warn(fmt::format("steps of {} tokens: the placement has memory for {}, which are used",
                             chunk, most));
  const int tokens =
      static_cast<int>(std::min<int64_t>({chunk, most, std::max(context, options.max_kv_tokens)}));
  return {tokens,
          std::min(tokens, std::max(options.max_logits,
                                    options.draft == DraftChoice::kOff ? 1 : 1 + kMaxDraftTokens))};
}

FitRequest fit_request(const ModelOptions& options, const Subject& subject,
                       const Decision& decision) {
  return {.config = subject.config,
          .context = decision.context,
          .kv_fraction = options.kv_fraction,
          .max_kv_tokens = options.max_kv_tokens,
          .kv_type = decision.parts.kv_type,
          .experts = options.experts,
          .on_other_ranks = subject.rank.n_ranks > 1
                                ? on_other_ranks(subject, decision.parts).experts
                                : GpuParts().on_other_ranks,
          .most_on_gpu = subject.most_on_gpu};
}

// other_bytes: of what is no weight.
HostMemory host_memory(const ModelOptions& options, const Subject& subject, bool with_gpu,
                       int64_t other_bytes) {
  const bool beside_gpu = with_gpu && !options.ranks.group;  // where few experts move at once
  return {.capacity_bytes = subject.memory_bytes,
          .bytes = [&subject, other_bytes, beside_gpu,
                    moves = options.moves_experts](const ExpertsLayout& experts) {
            const Subject& s = subject;
            const int n_spare = beside_gpu ? kHotExpertsAtOnce : most_of_layer(experts, s.config);
            const int64_t spare =
                moves ? SpareExperts::bytes_for(s.stored, s.config, s.home, experts, n_spare) : 0;
            return packed_bytes(s.stored, s.config, s.home, experts) + other_bytes + spare;
          }};
}

// A placement is checked against the memory without this room.
void require_room_to_move(const HostMemory& memory, const ExpertsLayout& experts) {
  const int64_t needed = memory.bytes(experts);
  require(needed <= memory.capacity_bytes,
          "--rebalance: the placement needs {:.1f} GB of memory on this rank with room for experts "
          "that move, and there are {:.1f} GB: leave it out, or place fewer experts here",
          needed * 1e-9, memory.capacity_bytes * 1e-9);
}

// Whether GPUs beside ranks without GPUs send rows to the ranks that have their experts.
bool rows_go_through_host(const ModelOptions& options, const Decision& decision) {
  return decision.beside_cpus && exchanges_rows(options, decision.parts.grid);
}

GpuShare gpu_share(const ModelOptions& options, const Subject& subject,
                   const std::optional<ExecutedParts>& placed, const Decision& decision) {
  FitRequest request = fit_request(options, subject, decision);
  const HostLayout hosts =
      hosts_of_stage(subject.host_of_rank, decision.parts.grid, subject.rank.rank);
  GpuMemory memory =
      gpu_memory(subject.stored, subject.config, gpu_options(options, decision, hosts));
  // Experts are streamed from this host's memory, where those of workers are not, and those of
  // ranks that rows go to.
  const bool on_host = rows_go_through_host(options, decision);
  memory.streams = memory.streams && !uses_workers(subject, decision.parts.grid) && !on_host;
  GpuShare share;
  if (placed) {
    require_fits(request, memory, *placed->gpu);
    if (options.max_kv_tokens > 0) request.max_kv_tokens = placed->kv_tokens;
    share = {*placed->gpu, fitting_kv_tokens(request, memory, *placed->gpu, 1)};
  } else {
    share = fit_gpu(request, memory);
    require(!options.experts || !all_on_gpu(share.parts),
            "--experts {}: a GPU keeps routed experts as the checkpoint stores them; leave it out",
            options.experts ? format_name(*options.experts) : "");
  }
  const std::string note =
      require_hand_off(on_host ? evenly_on_gpu(subject.config, 0) : share.parts);
  if (!note.empty()) options.warn(note);
  return share;
}

// Returns nothing after a warning if the CPU is to compute instead.
std::optional<GpuShare> gpu_share_or_warning(const ModelOptions& options, const Subject& subject,
                                             const std::optional<ExecutedParts>& placed,
                                             const Decision& decision) {
  try {
    return gpu_share(options, subject, placed, decision);
  } catch (const Error& why) {
    if (options.device != DeviceChoice::kAuto || placed) throw;
    options.warn(fmt::format("running on the CPU: {}", why.what()));
    return {};
  }
}

// All ranks compute together what they divide, and replicas with workers compute alone.
void require_divided(const ModelOptions& options, const ExecutedParts& parts) {
  if (!options.by_replicas->any()) return;
  require(
      parts.grid.n_replicas > 1,
      "--dp-divide: there is one replica of the backbone, whose ranks divide all of it: leave it "
      "out, or ask for more with --dp");
  require(!options.workers.any(),
          "--dp-divide: replicas beside workers compute alone: leave it out");
}

void require_routing_of_one_replica(const ModelOptions& options, const Decision& decision) {
  const BackboneGrid grid = decision.parts.grid;
  require((grid.n_replicas == 1 && grid.n_stages == 1) || !options.record_routing,
          "--record-routing: a replica of the backbone routes its own tokens only, and a pipeline "
          "stage has its own layers only: record with one of each");
}

// Ranks that exchange rows, and a backbone with workers, divide steps as the user says. A GPU and
// the CPU beside it do as placed. Rows between CPUs may be delayed; those between GPUs may go as
// between hosts.
void require_exchanged_rows(const ModelOptions& options, bool divides, bool delays,
                            bool simulates_hosts) {
  require(
      options.micro_batches == 0 || divides,
      "--micro-batches {}: rows travel only to workers (--workers, on GPUs with a whole backbone), "
      "between ranks with replicas (--dp), and between CPUs with gather, all-to-all or low-latency "
      "as --ep-dispatch, on GPUs only if they have all experts: leave it out",
      options.micro_batches);
  require(options.simulated_delay.count() == 0 || delays,
          "--simulate-delay {:g}: no rows travel between CPUs of several ranks: leave it out",
          options.simulated_delay.count() * 1e3);
  require(options.simulated_rate == 0 || delays,
          "--simulate-rate {:g}: no rows travel between CPUs of several ranks: leave it out",
          options.simulated_rate * 1e-9);
  require(
      options.simulated_hosts.empty() || simulates_hosts,
      "--simulate-hosts {}: no rows travel between CPUs, or GPUs, of several ranks: leave it out",
      fmt::join(options.simulated_hosts, ","));
}

// The experts that this host has of some layer.
std::vector<int> experts_here(const Elsewhere& elsewhere, int n_experts) {
  std::vector<int> experts;
  for (int e = 0; e < n_experts; ++e)
    if (std::any_of(elsewhere.experts.begin(), elsewhere.experts.end(),
                    [&](const std::vector<bool>& layer) { return !layer.empty() && !layer[e]; }))
      experts.push_back(e);
  return experts;
}

// fit_host(). With workers its Error names the experts that are here because no worker has them.
ExpertsLayout fit_beside(Elsewhere elsewhere, const FitRequest& request, const HostMemory& memory,
                         const Subject& subject) {
  if (subject.on_workers.empty()) return fit_host(request, memory, elsewhere);
  if (elsewhere.experts.empty()) elsewhere = {.experts = subject.on_workers, .backbone = false};
  for (size_t l = 0; l < elsewhere.experts.size(); ++l)
    for (size_t e = 0; e < elsewhere.experts[l].size(); ++e)
      if (subject.on_workers[l][e]) elsewhere.experts[l][e] = true;
  try {
    return fit_host(request, memory, elsewhere);
  } catch (const Error& error) {
    const std::vector<int> here = experts_here(elsewhere, subject.config.router.n_experts);
    if (here.empty()) throw;
    fail("no worker has experts {}, and with them {}", text_of_experts(here), error.what());
  }
}

// Formats of rows that do not travel are refused; `advice`: what makes them travel.
void require_rows_travel(const Decision& decision, bool travel, const char* advice) {
  require(travel || decision.rows == ExpertRows::kExact,
          "--ep-rows {}: no rows travel between ranks: leave it out, or {}", name_of(decision.rows),
          advice);
}

// Replicas have tokens of their own.
void require_rows_of_replicas(const ModelOptions& options, BackboneGrid grid) {
  require(grid.n_replicas == 1 || options.dispatch != ExpertDispatch::kAllReduce,
          "--ep-dispatch all-reduce: {} replicas of the backbone have tokens of their own: choose "
          "auto, gather, all-to-all or low-latency",
          grid.n_replicas);
}

// Where a CPU computes some experts, or experts are sliced among all GPUs, all rows go to all
// ranks. GPUs write into each other's memory on one host.
void require_dispatch_on_gpu(const ModelOptions& options, const Subject& subject, BackboneGrid grid,
                             const GpuParts& parts) {
  const std::optional<ExchangeMode> mode = exchange_mode(options.dispatch);
  require(grid.n_replicas > 1 || !mode,
          "--ep-dispatch {}: the GPUs of one replica add up their sums by all-reduce: leave it "
          "out, or use --device cpu",
          name_of(options.dispatch));
  require_rows_of_replicas(options, grid);
  require(!mode || *mode == ExchangeMode::kGather || (all_on_gpu(parts) && !parts.expert_columns),
          "--ep-dispatch {}: {}, so all rows go to all ranks: leave it out",
          name_of(options.dispatch),
          parts.expert_columns ? "experts are sliced among all GPUs" : "the CPU has some experts");
  const HostLayout hosts = hosts_of_stage(subject.host_of_rank, grid, subject.rank.rank);
  require(mode != ExchangeMode::kLowLatency || hosts.n_hosts() == 1 || hosts.has_equal_hosts(),
          "--ep-dispatch low-latency: the hosts have one GPU each, or not as many as each other: "
          "choose auto, gather or all-to-all");
}

void decide_on_gpu(const ModelOptions& options, const Subject& subject, bool placed,
                   const GpuShare& share, Decision& decision) {
  require(options.dense_products == DenseProducts::kTandem,
          "--dense-products {}: a GPU computes the dense products: leave it out, or use --device "
          "cpu",
          name_of(options.dense_products));
  const bool has_links = uses_workers(subject, decision.parts.grid);
  const bool on_host = rows_go_through_host(options, decision);
  const bool exchanges = on_host || (decision.parts.grid.n_replicas > 1 &&
                                     !are_replicas_with_workers(subject, decision.parts.grid));
  if (decision.beside_cpus)
    require_rows_of_replicas(options, decision.parts.grid);
  else
    require_dispatch_on_gpu(options, subject, decision.parts.grid, share.parts);
  require_rows_travel(decision, exchanges, "give replicas of the backbone (--dp)");
  require_routing_of_one_replica(options, decision);
  require(options.replica_choice == ReplicaChoice::kNearest,
          "--replica-choice {}: GPUs choose the nearest replica: leave it out, or use --device cpu",
          name_of(options.replica_choice));
  const bool whole = all_on_gpu(share.parts);
  const bool whole_steps = subject.rank.n_ranks > 1 && decision.parts.grid.n_replicas == 1;
  require_exchanged_rows(options, (exchanges && whole) || (has_links && !whole_steps), on_host,
                         on_host || (exchanges && whole));
  require(!whole || !options.record_timeline, "--timeline: all of the model is on the GPU");
  require(!whole || !has_links, "--workers: the GPU has room for all experts: leave it out");
  ExecutedParts& parts = decision.parts;
  parts.gpu = share.parts;
  parts.kv_tokens = share.kv_tokens;
  if (placed && !whole && options.moves_experts)
    require_room_to_move(host_memory(options, subject, true, 0), parts.experts);
  if (!placed && (!whole || on_host))
    parts.experts = fit_beside(beside_cpu(share.parts), fit_request(options, subject, decision),
                               host_memory(options, subject, true, 0), subject);
}

// Host memory on a CPU for one sequence's KV cache, and for the buffers in which rows travel
// between ranks.
int64_t bytes_beside_weights(const ModelOptions& options, const Subject& subject,
                             const Decision& decision) {
  const ExecutedParts& parts = decision.parts;
  const int64_t kv = KvCache::bytes_for(subject.config, decision.context, parts.kv_type,
                                        share_of(subject, parts).layers);
  if (!exchanges_rows(options, parts.grid)) return kv;
  const HostLayout hosts = hosts_of_stage(subject.host_of_rank, parts.grid, subject.rank.rank);
  return kv + ExchangedExperts::bytes_for(
                  subject.config, parts.grid.of_stage(), hosts, decision.limits.max_tokens,
                  exchange_mode(options.dispatch), exchanged_micro_batches(options, parts));
}

void decide_on_cpu(const ModelOptions& options, const Subject& subject, bool placed,
                   Decision& decision) {
  require_rows_of_replicas(options, decision.parts.grid);
  const bool exchanges = exchanges_rows(options, decision.parts.grid);
  require_exchanged_rows(options, exchanges || !subject.on_workers.empty(), exchanges, exchanges);
  require_rows_travel(decision, exchanges,
                      "give replicas of the backbone (--dp), or gather, all-to-all or low-latency "
                      "as --ep-dispatch on several ranks");
  require_routing_of_one_replica(options, decision);
  require(!options.record_timeline || exchanges,
          "--timeline shows GPU and CPU side by side, or CPU and network of ranks that exchange "
          "rows (--dp): use --device cuda");
  ExecutedParts& parts = decision.parts;
  parts.kv_type = cache_type_for(subject.kernels);
  require(!options.kv || *options.kv == parts.kv_type,
          "--kv {}: on the CPU the KV cache is {}; leave it out, or use --device cuda",
          options.kv ? format_name({*options.kv}) : "", format_name({parts.kv_type}));
  require(!options.fp8_activations,
          "--activations fp8: the CPU does not support them; leave it out, or use --device cuda");
  const HostMemory memory =
      host_memory(options, subject, false, bytes_beside_weights(options, subject, decision));
  if (placed && options.moves_experts) require_room_to_move(memory, parts.experts);
  if (placed) return;
  parts.experts = fit_beside(on_other_ranks(subject, parts),
                             fit_request(options, subject, decision), memory, subject);
}

}  // namespace

std::optional<ExchangeMode> exchange_mode(ExpertDispatch dispatch) {
  switch (dispatch) {
    case ExpertDispatch::kGather:
      return ExchangeMode::kGather;
    case ExpertDispatch::kAllToAll:
      return ExchangeMode::kAllToAll;
    case ExpertDispatch::kLowLatency:
      return ExchangeMode::kLowLatency;
    case ExpertDispatch::kAuto:
    case ExpertDispatch::kAllReduce:
      break;
  }
  return {};
}

bool exchanges_rows(const ModelOptions& options, BackboneGrid grid) {
  return options.ranks.group && !options.workers.any() &&
         (grid.n_replicas > 1 || exchange_mode(options.dispatch));
}

std::string why_not_of_two_kinds(const ModelOptions& options) {
  const std::pair<bool, const char*> others[] = {
      {options.workers.any(), "--workers"},
      {options.moves_experts, "--rebalance"},
      {options.record_timeline, "--timeline"},
      {options.micro_batches > 1, "--micro-batches"},
      {options.by_replicas && options.by_replicas->any(), "--dp-divide"},
      {options.identifies, "--role"},
      {options.kv && options.kv != DType::kBF16, "--kv"},
      {options.fp8_activations, "--activations"}};
  for (const auto& [asked, name] : others)
    if (asked) return fmt::format("{} needs ranks of one kind", name);
  return "";
}

HostLayout hosts_of_stage(const std::vector<int>& host_of_rank, BackboneGrid grid, int rank) {
  const int n = grid.n_of_stage();
  if (host_of_rank.empty()) return HostLayout::one_host(n);
  const auto first = host_of_rank.begin() + grid.stage_of(rank) * n;
  return HostLayout(std::vector<int>(first, first + n));
}

int exchanged_micro_batches(const ModelOptions& options, const ExecutedParts& parts) {
  if (options.micro_batches > 0) return options.micro_batches;
  return parts.micro_batches > 0 ? parts.micro_batches : ExpertPool::kMeasured;
}

int spare_experts(const GpuParts& parts) {
  int most = 0;
  for (const std::vector<bool>& layer : parts.experts)
    most = std::max(most, static_cast<int>(std::count(layer.begin(), layer.end(), true)));
  return parts.on_other_ranks.empty() ? kHotExpertsAtOnce : most;
}

Decision decide(const ModelOptions& options, const Subject& subject) {
  const bool with_gpu = has_gpu(options);
  const std::optional<ExecutedParts> placed = placed_parts(options, subject, with_gpu);
  Decision decision;
  if (placed) {
    decision.parts = *placed;
  } else {
    decision.parts.grid = asked_grid(options, subject);
    decision.parts.stages = even_stages(subject.config.n_layers, decision.parts.grid.n_stages);
    // Every replica with workers has its own experts, which count as the first rank's.
    if (subject.rank.n_ranks > 1)
      decision.parts.ranks_of_expert = ranks_beside_workers(
          subject.on_workers,
          are_replicas_with_workers(subject, decision.parts.grid) ? 1 : subject.rank.n_ranks);
  }
  if (options.by_replicas) {
    require_divided(options, decision.parts);
    decision.parts.by_replicas = *options.by_replicas;
  }
  decision.rows = options.rows.value_or(placed ? placed->rows : ExpertRows::kExact);
  decision.context = chosen_context(options, subject.config, placed);
  decision.limits = step_limits(options, decision.context, placed);
  const BackboneGrid grid = decision.parts.grid;
  if (decision.parts.by_replicas.any())  // each replica has a row in a piece of them
    decision.limits.max_tokens = std::max(decision.limits.max_tokens, grid.n_replicas);
  decision.parts.chunk_tokens = decision.limits.max_tokens;
  decision.beside_cpus = are_of_two_kinds(subject.on_gpu);
  decision.first_routes = are_of_two_kinds(gpus_of_replica(subject, grid));
  if (decision.beside_cpus) decision.parts.micro_batches = 1;
  if (subject.rank.n_ranks > 1 && !are_replicas_with_workers(subject, grid))
    decision.share = share_of(subject, decision.parts);
  std::optional<GpuShare> share;
  if (with_gpu) {
    decision.parts.kv_type = gpu_cache_type(options, placed);
    share = gpu_share_or_warning(options, subject, placed, decision);
  }
  if (share)
    decide_on_gpu(options, subject, placed.has_value(), *share, decision);
  else
    decide_on_cpu(options, subject, placed.has_value(), decision);
  const std::vector<WeightFormat> formats = decision.parts.experts.conversions();
  if (!placed && !options.experts && !formats.empty())
    options.warn(fmt::format("memory is too small for the experts as stored: they are kept as {}",
                             format_name(formats.front())));
  return decision;
}

std::optional<Decision> decide_with_mtp(const ModelOptions& options, const Subject& subject,
                                        const Decision& without) {
  ModelOptions same = options;
  same.device = without.parts.gpu ? DeviceChoice::kCuda : DeviceChoice::kCpu;
  same.warn = [](const std::string&) {};
  std::optional<Decision> decision;
  try {
    decision = decide(same, subject);
  } catch (const Error&) {  // too little memory: everything else was tried without the layers
    return {};
  }
  const ExecutedParts &parts = decision->parts, &before = without.parts;
  const bool whole = parts.gpu && all_on_gpu(*parts.gpu);
  if (parts.gpu && (whole != all_on_gpu(*before.gpu) ||
                    parts.gpu->embedding_on_cpu != before.gpu->embedding_on_cpu))
    return {};
  if (whole) return decision;
  const int64_t others = parts.gpu ? 0 : bytes_beside_weights(options, subject, *decision);
  const auto host_bytes = static_cast<double>(
      host_memory(options, subject, parts.gpu.has_value(), others).bytes(parts.experts));
  const bool fits = host_bytes <= kMostMemoryWithMtp * static_cast<double>(subject.memory_bytes);
  if (!fits || parts.experts.conversions() != before.experts.conversions()) return {};
  return decision;
}

GpuModelOptions gpu_options(const ModelOptions& options, const Decision& decision,
                            const HostLayout& hosts) {
  return {.max_tokens = decision.limits.max_tokens,
          .max_logits = decision.limits.max_logits,
          .context = decision.context,
          .cache_type = decision.parts.kv_type,
          .fp8_activations = options.fp8_activations,
          .share = decision.share,
          .grid = decision.share ? decision.parts.grid : BackboneGrid(),
          .beside_cpus = decision.beside_cpus,
          .exchanges_on_host = rows_go_through_host(options, decision),
          .replicated_experts = has_replicas(decision.parts),
          .moves_experts = options.moves_experts,
          .micro_batches = exchanged_micro_batches(options, decision.parts),
          .exchange = exchange_mode(options.dispatch),
          .rows = decision.rows,
          .hosts = hosts,
          .patience = rank_patience(options.workers, GpuModelOptions().patience)};
}

}  // namespace tandem
