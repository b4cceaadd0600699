#include "offload/parts/executed_parts.h"

#include <algorithm>
#include <map>

#include "core/check.h"
#include "core/rounding.h"
#include "model/cost.h"
#include "offload/parts/placed_workers.h"

namespace tandem {
namespace {

void require_here(const Machine& machine, const Placement& p, PlacedRank rank, int first = 0);
void require_executed(const ModelConfig& config, const Placement& p, PlacedRank rank);
std::optional<WeightFormat> cpu_format_of_layer(const LayerExperts& experts, int layer,
                                                DeviceId cpu);
bool all_exchanged(const Placement& p);
void require_two_kinds(const Placement& p);
bool is_sliced(const Placement& p);
RanksOfExperts ranks_of_experts(const ModelConfig& config, const Placement& p);
GpuParts gpu_parts(const ModelConfig& config, const Placement& p, PlacedRank rank,
                   const RanksOfExperts& ranks_of_expert);
ExecutedParts parts_of_host(const ModelConfig& config, const Placement& p, PlacedRank rank);
Elsewhere beside_workers(const ModelConfig& config, const Placement& own, DeviceId backbone);
// The devices of all stages, one after the other: those of ranks 0, 1, ..
std::vector<DeviceId> devices_of(const Placement& p) {
  std::vector<DeviceId> all;
  for (const Stage& s : p.stages) all.insert(all.end(), s.devices.begin(), s.devices.end());
  return all;
}
Placement from_host_0(Placement p);
std::vector<bool> are_gpus(std::span<const DeviceId> devices);
DeviceId backbone_of(const Placement& p, PlacedRank rank) { return devices_of(p)[rank.rank]; }
const Stage& stage_of_layer(const Placement& p, int layer) {
  return *std::find_if(p.stages.begin(), p.stages.end(),
                       [&](const Stage& s) { return layer <= s.last; });
}

}  // namespace

ExecutedParts executed_parts(const ModelConfig& config, const Machine& machine, const Placement& p,
                             PlacedRank rank) {
  if (rank.n_ranks == 1 && !worker_devices(p).empty()) {
    const Placement own = without_workers(p);
    require_here(machine, own, rank, backbone_of(own, rank).host);
    check_with_workers(config, p, &machine);
    ExecutedParts parts = parts_of_host(config, own, rank);
    parts.experts.keep_elsewhere(beside_workers(config, own, backbone_of(p, rank)));
    return parts;
  }
  const Placement own = from_host_0(p);
  require_here(machine, own, rank);
  if (rank.rank < std::ssize(devices_of(own)))
    check_placement_of_host(config, machine, own, backbone_of(own, rank).host);
  return parts_of_host(config, own, rank);
}

namespace {

ExecutedParts parts_of_host(const ModelConfig& config, const Placement& p, PlacedRank rank) {
  require_executed(config, p, rank);
  const WeightFormat stored = stored_expert_format(config);
  std::vector<std::optional<WeightFormat>> formats(config.n_layers);
  for (int l = 0; l < config.n_layers; ++l) {
    if (!config.is_moe(l)) continue;
    const std::optional<WeightFormat> format =
        cpu_format_of_layer(*experts_of_layer(p, l), l, {backbone_of(p, rank).host, -1});
    if (format && *format != stored) formats[l] = format;
  }
  // Dense layers, which have no experts, take the format of the next layer.
  for (int l = config.n_layers - 2; l >= 0; --l)
    if (!config.is_moe(l)) formats[l] = formats[l + 1];
  ExecutedParts parts = {
      {std::move(formats), p.numa_columns.empty() ? std::vector<int>() : p.numa_columns[0]},
      p.kv_tokens,
      p.kv_type,
      p.prefill_chunk_tokens,
      {}};
  parts.grid = {p.stages[0].dp(), p.stages[0].tp, static_cast<int>(p.stages.size())};
  if (parts.grid.n_replicas > 1)
    parts.by_replicas = {.dense = !p.dense_replicated, .head = !p.head_replicated};
  if (rank.n_ranks > 1 && p.micro_batches > 1) parts.micro_batches = p.micro_batches;
  parts.rows = p.expert_rows;
  for (const Stage& s : p.stages) parts.stages.push_back({s.first, s.last + 1 - s.first});
  if (rank.n_ranks > 1 && !is_sliced(p)) parts.ranks_of_expert = ranks_of_experts(config, p);
  if (backbone_of(p, rank).is_cpu()) return parts;
  parts.gpu = gpu_parts(config, p, rank, parts.ranks_of_expert);
  parts.experts.keep_elsewhere(beside_cpu(*parts.gpu));
  return parts;
}

// The same on hosts that are numbered from the first one with a part of the backbone on, as ranks
// are, and of that host's kind.
Placement from_host_0(Placement p) {
  if (devices_of(p).empty()) return p;  // not sound
  const int first = backbone_of(p, {}).host;
  if (p.numa_columns.size() > 1) p.numa_columns = {columns_of_host(p, first)};
  p.hosts_of_kinds.clear();
  for (Stage& stage : p.stages)
    for (DeviceId& d : stage.devices) d.host -= first;
  for (LayerExperts& l : p.layers)
    for (ExpertGroup& group : l.groups)
      for (DeviceId& d : group.owners) d.host -= first;
  return p;
}

// Which devices are GPUs.
std::vector<bool> are_gpus(std::span<const DeviceId> devices) {
  std::vector<bool> gpus;
  for (const DeviceId d : devices) gpus.push_back(!d.is_cpu());
  return gpus;
}

// Whether each is the next GPU of its host, or the next host's CPU or first GPU.
bool follow_each_other(const std::vector<DeviceId>& devices) {
  for (size_t i = 0; i < devices.size(); ++i) {
    const DeviceId d = devices[i];
    const bool begins_host = d.gpu <= 0 && (i == 0 || d.host == devices[i - 1].host + 1);
    const bool goes_on =
        i > 0 && d.host == devices[i - 1].host && d.gpu > 0 && d.gpu == devices[i - 1].gpu + 1;
    if (!begins_host && !goes_on) return false;
  }
  return true;
}

int n_on_first_host(const std::vector<DeviceId>& devices) {
  const auto n = std::count_if(devices.begin(), devices.end(),
                               [&](DeviceId d) { return d.host == devices[0].host; });
  return std::max(1, static_cast<int>(n));
}

}  // namespace

std::string why_not_executed(const ModelConfig& config, const Machine& machine,
                             const Placement& p) {
  if (!worker_devices(p).empty()) return why_not_run(config, p);
  const DeviceId first = backbone_of(p, {});
  const int n = n_ranks_of(p);
  const int n_of_host = n_on_first_host(devices_of(p));
  // As each rank describes it: all hosts like its own, and with as many GPUs where ranks are of two
  // kinds.
  Machine seen = machine;
  static_cast<HostKind&>(seen) = machine.of_kind(machine.kind_of(first.host));
  seen.other_kinds.clear();
  if (are_of_two_kinds(are_gpus(devices_of(p)))) {
    seen.hosts = n;
    seen.gpus.resize(n, seen.gpus.empty() ? Gpu() : seen.gpus[0]);
  } else {
    seen.hosts = first.is_cpu() ? n : std::max(1, n / n_of_host);
    seen.gpus.resize(first.is_cpu() ? 0 : std::min<size_t>(n_of_host, seen.gpus.size()));
  }
  try {
    executed_parts(config, seen, p, {0, n, n > 1 ? n_of_host : 1});
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

int n_ranks_of(const Placement& p) {
  const std::vector<DeviceId> devices = devices_of(p);
  const auto n = static_cast<int>(devices.size());
  if (devices.empty()) return 1;
  const int first = devices[0].host;
  const bool on_cpus = devices[0].is_cpu();
  if (are_of_two_kinds(are_gpus(devices))) return follow_each_other(devices) ? n : 1;
  const int n_of_host = n_on_first_host(devices);
  for (int rank = 0; rank < n; ++rank)
    if (devices[rank] != (on_cpus ? DeviceId{first + rank, -1}
                                  : DeviceId{first + rank / n_of_host, rank % n_of_host}))
      return 1;
  return n;
}

std::vector<bool> ranks_on_gpus(const Placement& p) {
  std::vector<DeviceId> devices = devices_of(p);
  devices.resize(n_ranks_of(p));
  return are_gpus(devices);
}

bool are_of_two_kinds(const std::vector<bool>& on_gpu) {
  const auto n = std::count(on_gpu.begin(), on_gpu.end(), true);
  return n > 0 && n < std::ssize(on_gpu);
}

bool has_replicas(const ExecutedParts& parts) {
  return std::any_of(
      parts.ranks_of_expert.begin(), parts.ranks_of_expert.end(), [](const auto& layer) {
        return std::any_of(layer.begin(), layer.end(), [](const auto& r) { return r.size() > 1; });
      });
}

bool all_on_gpu(const GpuParts& parts) {
  const auto beside = beside_cpu(parts).experts;
  return std::all_of(beside.begin(), beside.end(), [](const auto& layer) {
    return std::find(layer.begin(), layer.end(), false) == layer.end();
  });
}

Elsewhere beside_cpu(const GpuParts& parts) {
  Elsewhere elsewhere = {parts.experts};
  for (size_t l = 0; l < parts.on_other_ranks.size(); ++l)
    for (size_t e = 0; e < parts.on_other_ranks[l].size(); ++e)
      if (parts.on_other_ranks[l][e]) elsewhere.experts[l][e] = true;
  return elsewhere;
}

GpuParts evenly_on_gpu(const ModelConfig& config, int64_t n_experts,
                       std::vector<std::vector<bool>> on_other_ranks) {
  GpuParts parts = {.experts = std::vector<std::vector<bool>>(config.n_all_layers())};
  parts.on_other_ranks = std::move(on_other_ranks);
  int64_t n_left = 0;  // layers
  const auto has_any = [&](int l) {
    const auto& others = parts.on_other_ranks;
    return config.is_moe(l) && (others.empty() || std::find(others[l].begin(), others[l].end(),
                                                            false) != others[l].end());
  };
  for (int l = 0; l < config.n_all_layers(); ++l) n_left += has_any(l);
  for (int l = 0; l < config.n_all_layers(); ++l) {
    if (!config.is_moe(l)) continue;
    std::vector<bool>& layer = parts.experts[l];
    layer.assign(config.router.n_experts, false);
    if (!has_any(l)) continue;
    int64_t n = ceil_div(n_experts, n_left--);
    for (int e = 0; e < config.router.n_experts && n > 0; ++e) {
      if (!parts.on_other_ranks.empty() && parts.on_other_ranks[l][e]) continue;
      layer[e] = true;
      --n;
      --n_experts;
    }
  }
  return parts;
}

namespace {

// Runs before check_placement: a device that this program cannot use is refused as such, whether
// the machine has it or not. first: the host of rank 0.
void require_here(const Machine& machine, const Placement& p, PlacedRank rank, int first) {
  const int n = rank.n_ranks;
  const bool two_kinds = are_of_two_kinds(are_gpus(devices_of(p)));
  const int n_of_host = two_kinds ? n : rank.n_of_host;
  const int n_gpus = std::min(static_cast<int>(machine.gpus.size()), n_of_host);  // of a host
  const int n_hosts = n_gpus > 0 && !two_kinds ? std::max(n / n_of_host, 1) : n;
  const auto runs_on = [&](DeviceId d) {
    return d.host >= first && d.host < first + n_hosts && d.gpu < n_gpus;
  };
  const DeviceId cpu = {first, -1}, gpu = {first, 0};
  const std::string known =
      n_gpus > 0 && n > 1
          ? fmt::format("the CPUs and the first {} GPUs of {} hosts", n_gpus, n_hosts)
      : n_gpus > 0 ? fmt::format("{} and {}", device_name(cpu), device_name(gpu))
      : n > 1      ? fmt::format("{} to {}, the CPUs of {} ranks,", device_name(cpu),
                                 device_name({n - 1, -1}), n)
                   : device_name(cpu);
  for (const Stage& s : p.stages)
    for (const DeviceId d : s.devices)
      require(runs_on(d),
              "placement: layers {}-{} of the backbone are on {}: this program runs them on {} "
              "only{} (`tandem plan --placement` assesses other places)",
              s.first, s.last, device_name(d), known, d == gpu ? ", or with --device cuda" : "");
  for (const LayerExperts& l : p.layers)
    for (const ExpertGroup& group : l.groups)
      for (const DeviceId d : group.owners)
        require(runs_on(d),
                "placement: layer {}: expert {} is on {}: this program runs experts on {} only{} "
                "(`tandem plan --placement` assesses other places)",
                l.first, group.experts.empty() ? 0 : group.experts.front(), device_name(d), known,
                d == gpu ? ", or with --device cuda" : "");
}

// Whether rows of all experts travel between GPUs.
bool all_exchanged(const Placement& p) {
  for (const LayerExperts& l : p.layers)
    for (const ExpertGroup& group : l.groups)
      if (group.sliced || group.owners[0].is_cpu()) return false;
  return true;
}

void require_executed(const ModelConfig& config, const Placement& p, PlacedRank rank) {
  require(p.backbone == stored_format(config),
          "placement: the backbone is {}: this program keeps it as stored, {}",
          format_name(p.backbone), format_name(stored_format(config)));
  const int n = rank.n_ranks;
  const bool divided = std::ssize(devices_of(p)) == n;
  require(
      divided || n > 1,
      "placement: the backbone is on several devices: this program runs it on one, or on a rank "
      "for each of several hosts (docs/scale_out.md)");
  require(divided,
          "placement: {} ranks have the backbone: this program runs it on the CPUs of as many "
          "hosts; plan for a machine with hosts: {}, or start as many ranks as the placement has "
          "hosts",
          n, n);
  require(n == 1 || n_ranks_of(p) == n,
          "placement: the backbone is on {}, .. in an order of its own: with {} ranks, rank r has "
          "the r-th device of the hosts in their order",
          device_name(backbone_of(p, {})), n);
  const bool on_gpu = !backbone_of(p, rank).is_cpu();
  const bool two_kinds = are_of_two_kinds(are_gpus(devices_of(p)));
  const int n_replicas = p.stages[0].dp();
  for (const Stage& s : p.stages)
    require(s.dp() == n_replicas && s.tp == p.stages[0].tp,
            "placement: layers {}-{} have {} replicas of tp {}, and layers 0-{} have {} of tp {}: "
            "this program divides all stages alike",
            s.first, s.last, s.dp(), s.tp, p.stages[0].last, n_replicas, p.stages[0].tp);
  if (two_kinds) require_two_kinds(p);
  require(p.micro_batches == 1 || n == 1 || (n_replicas > 1 && (!on_gpu || all_exchanged(p))),
          "placement: micro_batches is {}: ranks divide steps where replicas exchange the rows of "
          "their experts, on GPUs only if those have all experts, whole; set it to 1",
          p.micro_batches);
  require(!on_gpu || !p.head_on_cpu || two_kinds,
          "placement: the head is on the CPU and the backbone on a GPU: this program runs them on "
          "one device");
  require(on_gpu || two_kinds || p.stream_from_tokens == 0,
          "placement: stream_from_tokens is {}: there is no GPU to stream experts to; set it to 0",
          p.stream_from_tokens);
  require(on_gpu || n > 1 || p.micro_batches == 1,
          "placement: micro_batches is {}: there is no GPU that the CPU could overlap with; set it "
          "to 1",
          p.micro_batches);
  const WeightFormat stored = stored_expert_format(config);
  for (const LayerExperts& l : p.layers)
    for (const ExpertGroup& group : l.groups) {
      if (group.sliced)
        require(n > 1 && on_gpu && group.owners == stage_of_layer(p, l.last).devices &&
                    std::ssize(group.experts) == config.router.n_experts,
                "placement: layer {}: expert {} is sliced: this program slices all experts of all "
                "layers, among the GPUs that divide the backbone, or none",
                l.first, group.experts.front());
      else
        require(group.owners.size() == 1 || n > 1,
                "placement: layer {}: expert {} has {} owners: one rank runs it on one device",
                l.first, group.experts.front(), group.owners.size());
      require(
          two_kinds ||
              std::none_of(group.owners.begin(), group.owners.end(),
                           [&](DeviceId d) { return d.is_cpu() != group.owners[0].is_cpu(); }),
          "placement: layer {}: expert {} is on CPUs and on GPUs: this program keeps replicas on "
          "devices of one kind",
          l.first, group.experts.front());
      require(group.sliced == is_sliced(p),
              "placement: layer {}: expert {} is {} and others are not: this program slices all "
              "experts or none",
              l.first, group.experts.front(), group.sliced ? "sliced" : "whole");
      if (group.owners[0].is_cpu()) continue;
      require(on_gpu || two_kinds,
              "placement: layer {}: expert {} is on {} and the backbone is not: this program runs "
              "experts on a GPU beside a backbone there",
              l.first, group.experts.front(), device_name(group.owners[0]));
      require(group.format == stored,
              "placement: layer {}: expert {} is {} on a GPU, which keeps experts as stored, {}",
              l.first, group.experts.front(), format_name(group.format), format_name(stored));
    }
}

// What ranks do not do of which some have their part of the backbone on a GPU and others on a CPU.
void require_two_kinds(const Placement& p) {
  for (const Stage& s : p.stages)
    for (auto first = s.devices.begin(); first != s.devices.end(); first += s.tp)
      require(!are_of_two_kinds(are_gpus({first, first + s.tp})),
              "placement: layers {}-{}: a replica is on {}, GPUs and CPUs: give them to the GPUs "
              "alone, and start as many ranks without a placement, or workers, for experts on "
              "other hosts",
              s.first, s.last, device_names(std::span(&*first, s.tp)));
  for (const LayerExperts& l : p.layers)
    for (const ExpertGroup& group : l.groups)
      require(group.owners.size() == 1 || p.stages[0].dp() > 1,
              "placement: layer {}: expert {} has {} owners: where some ranks have GPUs and others "
              "none, experts have one each unless there are replicas of the backbone",
              l.first, group.experts.front(), group.owners.size());
  require(p.micro_batches == 1,
          "placement: micro_batches is {}: where some ranks have GPUs and others none, steps stay "
          "whole; set it to 1",
          p.micro_batches);
  require(
      p.stages[0].dp() == 1 || (p.dense_replicated && p.head_replicated),
      "placement: dense layers or the head are shared by all devices: where some ranks have GPUs "
      "and others none, each replica has whole ones; set replicated and dense_replicated to "
      "true");
  require(
      p.stream_from_tokens == 0 || p.stages[0].dp() == 1,
      "placement: stream_from_tokens is {}: where some replicas have GPUs and others none, rows "
      "go to the experts; set it to 0",
      p.stream_from_tokens);
  for (const Stage& s : p.stages) {
    const bool at_end = &s == &p.stages.back(), on_cpu = s.devices[0].is_cpu();
    require(!at_end || s.dp() > 1 || p.head_on_cpu == on_cpu,
            "placement: the head is on the {} and the last stage on {}: this program runs them on "
            "one device",
            p.head_on_cpu ? "CPU" : "GPU", device_name(s.devices[0]));
  }
}

// Whether devices have slices of experts, as its first layer says.
bool is_sliced(const Placement& p) {
  return !p.layers.empty() && !p.layers[0].groups.empty() && p.layers[0].groups[0].sliced;
}

// [n_all_layers][n_experts] of(group, layer) for each expert, empty for a dense layer. Layers for
// multi-token prediction, which a placement does not list, are like the last layer.
template <class Of>
auto by_expert(const ModelConfig& config, const Placement& p, Of of) {
  std::vector<std::vector<decltype(of(ExpertGroup(), 0))>> all(config.n_all_layers());
  for (int l = 0; l < config.n_layers; ++l) {
    if (!config.is_moe(l)) continue;
    all[l].resize(config.router.n_experts);
    for (const ExpertGroup& group : experts_of_layer(p, l)->groups)
      for (const int e : group.experts) all[l][e] = of(group, l);
  }
  for (int l = config.n_layers; l < config.n_all_layers(); ++l) all[l] = all[config.n_layers - 1];
  return all;
}

// The ranks within the layer's stage that have each expert. The ranks of a host deal the experts of
// its CPUs among themselves.
RanksOfExperts ranks_of_experts(const ModelConfig& config, const Placement& p) {
  std::map<std::pair<int, int>, int> n_dealt;  // of a layer and a host
  return by_expert(config, p, [&](const ExpertGroup& group, int layer) {
    const std::vector<DeviceId>& devices = stage_of_layer(p, layer).devices;
    std::vector<int> ranks;
    for (const DeviceId owner : group.owners) {
      std::vector<int> candidates;
      for (int i = 0; i < std::ssize(devices); ++i)
        if (devices[i] == owner || (owner.is_cpu() && devices[i].host == owner.host))
          candidates.push_back(i);
      require(
          !candidates.empty(),
          "placement: layer {}: an expert is on {}, where the layer's stage of the backbone has no "
          "device: this program runs experts beside the backbone of their layer",
          layer, device_name(owner));
      ranks.push_back(candidates[n_dealt[{layer, owner.host}]++ % std::ssize(candidates)]);
    }
    std::sort(ranks.begin(), ranks.end());
    ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());  // its GPU and its CPU
    return ranks;
  });
}

// The format of the layer's experts on these CPUs; empty if there are none.
std::optional<WeightFormat> cpu_format_of_layer(const LayerExperts& experts, int layer,
                                                DeviceId cpu) {
  const ExpertGroup* first = nullptr;
  for (const ExpertGroup& group : experts.groups) {
    if (!group.is_on(cpu)) continue;
    if (!first) first = &group;
    require(group.format == first->format,
            "placement: layer {}: expert {} is {} and expert {} is {}: this program keeps all "
            "experts of a layer in one format",
            layer, first->experts.front(), format_name(first->format), group.experts.front(),
            format_name(group.format));
  }
  return first ? first->format : std::optional<WeightFormat>();
}

// What a backbone's host does not keep in memory: the experts of its GPU and those of workers.
Elsewhere beside_workers(const ModelConfig& config, const Placement& own, DeviceId backbone) {
  Elsewhere elsewhere = {.experts = by_expert(config, own,
                                              [&](const ExpertGroup& group, int) {
                                                return group.is_on({backbone.host, -1});
                                              }),
                         .backbone = !backbone.is_cpu()};
  for (std::vector<bool>& layer : elsewhere.experts) layer.flip();
  return elsewhere;
}

GpuParts gpu_parts(const ModelConfig& config, const Placement& p, PlacedRank rank,
                   const RanksOfExperts& ranks_of_expert) {
  const DeviceId gpu = backbone_of(p, rank);
  const int n_of_stage = static_cast<int>(p.stages[0].devices.size());
  const Stage& stage = p.stages[rank.rank / n_of_stage];
  const int in_stage = rank.rank % n_of_stage;
  const auto is_here = [&](int layer) { return layer >= stage.first && layer <= stage.last; };
  std::vector<std::vector<bool>> on_other_ranks;
  if (!ranks_of_expert.empty() || p.stages.size() > 1)
    on_other_ranks =
        by_expert(config, p, [&](const ExpertGroup&, int layer) { return !is_here(layer); });
  for (size_t l = 0; l < ranks_of_expert.size(); ++l)
    for (size_t e = 0; e < ranks_of_expert[l].size(); ++e) {
      const std::vector<int>& ranks = ranks_of_expert[l][e];
      if (std::find(ranks.begin(), ranks.end(), in_stage) == ranks.end())
        on_other_ranks[l][e] = true;
    }
  std::optional<Slice> expert_columns;
  if (is_sliced(p)) {
    const int64_t n = config.expert_dim / n_of_stage;
    expert_columns = {in_stage * n, n};
  }
  return {.embedding_on_cpu = p.embedding_on_cpu,
          .stream_from_tokens = p.stream_from_tokens,
          .micro_batches_from_sequences = p.micro_batches == 2 ? p.micro_batches_from_sequences : 0,
          .experts = by_expert(config, p,
                               [&](const ExpertGroup& group, int layer) {
                                 return is_here(layer) && (expert_columns || group.is_on(gpu));
                               }),
          .on_other_ranks = std::move(on_other_ranks),
          .expert_columns = expert_columns};
}

}  // namespace
}  // namespace tandem
