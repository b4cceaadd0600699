#include "offload/plan/placement.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "core/check.h"
#include "core/memory.h"
#include "model/cost.h"
#include "model/kv_layout.h"
#include "model/parameters.h"
#include "offload/plan/moving_experts.h"

namespace tandem {

namespace {

bool exists(const Machine& m, DeviceId d) {
  return d.host >= 0 && d.host < m.n_hosts() && d.gpu >= -1 &&
         d.gpu < static_cast<int>(m.host(d.host).gpus.size());
}

void check_stages(const ModelConfig& config, const Machine& machine, const Placement& p);
void check_layer(const ModelConfig& config, const Machine& machine, const Placement& p, int layer);
void check_group(const ModelConfig& config, const Machine& machine, const ExpertGroup& group,
                 int layer);
void check_numa(const ModelConfig& config, const Machine& machine, const Placement& p);
std::string first_without_room(const ModelConfig& config, const Placement& p,
                               const DeviceMemory& memory);
void check_form(const ModelConfig& config, const Machine& machine, const Placement& p);
void check_memory(const ModelConfig& config, const Placement& p, const DeviceMemory& memory);

}  // namespace

std::string device_name(DeviceId d) {
  return d.is_cpu() ? fmt::format("host{}.cpu", d.host)
                    : fmt::format("host{}.gpu{}", d.host, d.gpu);
}

std::string device_names(std::span<const DeviceId> devices) {
  std::string text;
  for (const DeviceId d : devices) text += (text.empty() ? "" : ", ") + device_name(d);
  return text;
}

void check_placement(const ModelConfig& config, const Machine& machine, const Placement& p) {
  check_form(config, machine, p);
  for (const DeviceMemory& m : memory_by_device(config, machine, p)) check_memory(config, p, m);
}

void check_placement_of_host(const ModelConfig& config, const Machine& machine, const Placement& p,
                             int host) {
  check_form(config, machine, p);
  for (const DeviceMemory& m : memory_by_device(config, machine, p))
    if (m.device.host == host) check_memory(config, p, m);
}

namespace {

// Everything but memory.
void check_form(const ModelConfig& config, const Machine& machine, const Placement& p) {
  check_stages(config, machine, p);
  int after_last = 0;
  for (const LayerExperts& l : p.layers) {
    require(l.first >= after_last && l.last >= l.first && l.last < config.n_layers,
            "placement: layers {}-{} do not follow the previous ones or exceed the model's {}",
            l.first, l.last, config.n_layers);
    after_last = l.last + 1;
  }
  for (int l = 0; l < config.n_layers; ++l)
    if (config.is_moe(l)) check_layer(config, machine, p, l);
  check_numa(config, machine, p);
  require(p.prefill_chunk_tokens >= 1 && p.stream_from_tokens >= 0 && p.kv_tokens >= 1,
          "placement: chunks of {} tokens, streamed from {}, and {} tokens of KV: must not be less "
          "than 1, 0 and 1",
          p.prefill_chunk_tokens, p.stream_from_tokens, p.kv_tokens);
  const bool gpus_attend = std::none_of(p.stages.begin(), p.stages.end(), [](const Stage& s) {
    return std::any_of(s.devices.begin(), s.devices.end(), [](DeviceId d) { return d.is_cpu(); });
  });
  require(
      p.kv_type == DType::kBF16 || (gpus_attend && takes_fp8_cache(config.mla)),
      "placement: KV cache in fp8: must be bf16, as {}",
      gpus_attend ? "this model's latents are larger than DeepSeek's" : "a CPU computes attention");
  require(p.expert_rows == ExpertRows::kExact || rows_travel(p),
          "placement: ep_rows {}: must be {}, as no rows travel between ranks",
          name_of(p.expert_rows), name_of(ExpertRows::kExact));
  require(p.micro_batches == 1 || p.micro_batches == 2,
          "placement: {} micro-batches: must be 1 or 2", p.micro_batches);
  require(p.micro_batches_from_sequences >= 2,
          "placement: micro-batches from {} sequences on: must be 2 or more",
          p.micro_batches_from_sequences);
}

void check_memory(const ModelConfig& config, const Placement& p, const DeviceMemory& m) {
  require(m.free_bytes() >= 0,
          "placement: {} holds {:.2f} GB and gets {:.2f} GB of weights, {:.2f} GB of KV cache, "
          "{:.2f} GB of activations{} with {:.2f} GB in reserve: move {:.2f} GB elsewhere{}",
          device_name(m.device), gigabytes(m.capacity_bytes), gigabytes(m.weights_bytes),
          gigabytes(m.kv_bytes), gigabytes(m.activation_bytes),
          m.spare_bytes > 0
              ? fmt::format(", {:.2f} GB for experts that move", gigabytes(m.spare_bytes))
              : "",
          gigabytes(m.reserve_bytes), gigabytes(-m.free_bytes()), first_without_room(config, p, m));
}

}  // namespace

bool rows_travel(const Placement& p) {
  const bool has_replicas =
      std::any_of(p.stages.begin(), p.stages.end(), [](const Stage& s) { return s.dp() > 1; });
  return has_replicas && !p.layers.empty() && worker_hosts(p).empty();
}

bool has_backbone(const Placement& p, int host) {
  const auto is_there = [&](DeviceId d) { return d.host == host; };
  return std::any_of(p.stages.begin(), p.stages.end(), [&](const Stage& stage) {
    return std::any_of(stage.devices.begin(), stage.devices.end(), is_there);
  });
}

std::vector<DeviceId> worker_devices(const Placement& p) {
  std::set<DeviceId> devices;
  for (const LayerExperts& l : p.layers)
    for (const ExpertGroup& group : l.groups)
      devices.insert(group.owners.begin(), group.owners.end());
  std::erase_if(devices, [&](DeviceId d) { return has_backbone(p, d.host); });
  return {devices.begin(), devices.end()};
}

std::vector<int> worker_hosts(const Placement& p) {
  std::vector<int> hosts;
  for (const DeviceId d : worker_devices(p))
    if (hosts.empty() || hosts.back() != d.host) hosts.push_back(d.host);
  return hosts;
}

WeightFormat worker_gpu_format(const ModelConfig& c) {
  const WeightFormat stored = stored_expert_format(c);
  return is_i4(stored.dtype) ? WeightFormat{DType::kBF16} : stored;
}

std::vector<int> hosts_of_kinds(const Machine& m) {
  std::vector<int> hosts;
  for (int kind = 0; m.n_kinds() > 1 && kind < m.n_kinds(); ++kind)
    hosts.push_back(m.of_kind(kind).hosts);
  return hosts;
}

std::vector<int> columns_of_host(const Placement& p, int host) {
  const size_t n_kinds = p.numa_columns.size();
  if (n_kinds < 2) return n_kinds == 0 ? std::vector<int>() : p.numa_columns[0];
  require(p.hosts_of_kinds.size() == n_kinds,
          "placement: numa_columns are of {} kinds of hosts, and hosts_of_kinds has {} numbers: "
          "name how many hosts each kind has",
          n_kinds, p.hosts_of_kinds.size());
  int64_t end = 0;
  for (size_t kind = 0; kind < n_kinds; ++kind) {
    end += p.hosts_of_kinds[kind];
    if (host < end) return p.numa_columns[kind];
  }
  fail(
      "placement: host{} has a part of the model, and the kinds of hosts_of_kinds have {} hosts: "
      "name how many each kind has",
      host, end);
}

const LayerExperts* experts_of_layer(const Placement& p, int layer) {
  for (const LayerExperts& l : p.layers)
    if (l.first <= layer && layer <= l.last) return &l;
  return nullptr;
}

int64_t reserved_bytes(int64_t capacity, bool cpu) {
  constexpr int64_t kSystem = 2'000'000'000, kDriver = 1'000'000'000;
  return std::min(capacity, (cpu ? kSystem : kDriver) + capacity / 50);
}

std::vector<DeviceMemory> memory_by_device(const ModelConfig& c, const Machine& machine,
                                           const Placement& p) {
  std::vector<DeviceMemory> memory;
  std::vector<size_t> first_of_host;
  for (int kind = 0, host = 0; kind < machine.n_kinds(); ++kind) {
    const HostKind& alike = machine.of_kind(kind);
    for (const int end = host + alike.hosts; host < end; ++host) {
      first_of_host.push_back(memory.size());
      for (int gpu = -1; gpu < static_cast<int>(alike.gpus.size()); ++gpu) {
        const int64_t capacity = gpu < 0 ? alike.memory_bytes() : alike.gpus[gpu].memory_bytes;
        memory.push_back({.device = {host, gpu},
                          .reserve_bytes = reserved_bytes(capacity, gpu < 0),
                          .capacity_bytes = capacity});
      }
    }
  }
  const auto at = [&](DeviceId d) -> DeviceMemory& {
    return memory[first_of_host[d.host] + d.gpu + 1];
  };
  const int64_t moe = backbone_layer_bytes(c, true, p.backbone).total();
  const BackboneBytes dense = backbone_layer_bytes(c, false, p.backbone);
  for (const Stage& stage : p.stages) {
    const int64_t n = stage.last - stage.first + 1, n_moe = moe_layers(c, stage.first, stage.last);
    int64_t weights = n_moe * moe + (n - n_moe) * dense.total();
    const int64_t divided = (n - n_moe) * dense.dense;
    if (!p.dense_replicated) weights -= divided - divided / stage.dp();
    const int64_t kv = p.kv_tokens * kv_bytes_per_token(c, p.kv_type, stage.first, stage.last);
    for (const DeviceId d : stage.devices) {
      const int value_bytes = d.is_cpu() ? 4 : 2;
      at(d).weights_bytes += weights / stage.tp;
      at(d).kv_bytes += kv;  // the latent has one head: every tensor-parallel rank stores all of it
      at(d).activation_bytes +=
          p.prefill_chunk_tokens * activation_values_per_token(c) * value_bytes / stage.tp;
    }
  }
  const auto add_table = [&](const Stage& stage, bool on_cpu, bool replicated) {
    const int64_t share = replicated ? stage.tp : static_cast<int64_t>(stage.devices.size());
    std::vector<DeviceId> homes = stage.devices;
    for (DeviceId& d : homes)
      if (on_cpu) d.gpu = -1;
    std::sort(homes.begin(), homes.end());
    if (on_cpu) homes.erase(std::unique(homes.begin(), homes.end()), homes.end());
    for (const DeviceId d : homes) at(d).weights_bytes += embedding_bytes(c) / (on_cpu ? 1 : share);
  };
  add_table(p.stages.front(), p.embedding_on_cpu, true);
  if (!c.tied_head) add_table(p.stages.back(), p.head_on_cpu, p.head_replicated);
  for (const LayerExperts& l : p.layers) {
    const int n_moe = moe_layers(c, l.first, l.last);
    for (const ExpertGroup& g : l.groups) {
      const int64_t bytes = routed_expert_bytes(c, g.format) *
                            static_cast<int64_t>(g.experts.size()) * n_moe /
                            (g.sliced ? static_cast<int64_t>(g.owners.size()) : 1);
      for (const DeviceId d : g.owners) at(d).weights_bytes += bytes;
    }
  }
  if (p.stream_from_tokens > 0)
    for (const Stage& stage : p.stages)
      for (const DeviceId d : stage.devices)
        at(d).activation_bytes +=
            kStreamedExperts * routed_expert_bytes(c, stored_expert_format(c));
  if (p.room_to_move && !why_experts_stay(p))
    for (DeviceMemory& m : memory)
      if (const auto format = format_of_experts(c, p, m.device))
        m.spare_bytes = spare_experts(p, m.device) * routed_expert_bytes(c, *format);
  return memory;
}

namespace {

void check_stages(const ModelConfig& c, const Machine& machine, const Placement& p) {
  require(!p.stages.empty(), "placement: no stages: say which devices compute the backbone");
  int next = 0;
  for (const Stage& s : p.stages) {
    require(s.first == next && s.last >= s.first && s.last < c.n_layers,
            "placement: a stage has layers {}-{}: it must start with layer {} and end within the "
            "model's {} layers",
            s.first, s.last, next, c.n_layers);
    next = s.last + 1;
    require(!s.devices.empty() && s.tp >= 1 && s.devices.size() % s.tp == 0,
            "placement: layers {}-{}: {} devices cannot form replicas of {}", s.first, s.last,
            s.devices.size(), s.tp);
    for (const DeviceId d : s.devices)
      require(exists(machine, d), "placement: layers {}-{} are on {}, which {} does not have",
              s.first, s.last, device_name(d), machine.name);
    for (size_t i = 1; i < s.devices.size(); ++i)
      require(std::find(s.devices.begin(), s.devices.begin() + static_cast<int64_t>(i),
                        s.devices[i]) == s.devices.begin() + static_cast<int64_t>(i),
              "placement: layers {}-{} name {} twice", s.first, s.last, device_name(s.devices[i]));
  }
  require(next == c.n_layers, "placement: layer {} has no stage: the model has {} layers", next,
          c.n_layers);
}

void check_layer(const ModelConfig& c, const Machine& machine, const Placement& p, int layer) {
  const LayerExperts* l = experts_of_layer(p, layer);
  require(l != nullptr, "placement: layer {}: no expert has an owner: name them", layer);
  if (layer > l->first && c.is_moe(layer - 1)) return;  // checked with an earlier layer
  std::vector<bool> owned(c.router.n_experts, false);
  for (const ExpertGroup& group : l->groups) {
    check_group(c, machine, group, layer);
    for (const int e : group.experts) {
      require(e >= 0 && e < c.router.n_experts,
              "placement: layer {}: expert {} does not exist: the model has 0-{}", layer, e,
              c.router.n_experts - 1);
      require(!owned[e],
              "placement: layer {}: expert {} is listed twice: name all its owners in one group",
              layer, e);
      owned[e] = true;
    }
  }
  for (int e = 0; e < c.router.n_experts; ++e)
    require(owned[e], "placement: layer {}: expert {} has no owner: name one", layer, e);
}

void check_group(const ModelConfig& c, const Machine& machine, const ExpertGroup& group,
                 int layer) {
  require(!group.experts.empty(), "placement: layer {}: a group has no experts: remove it", layer);
  require(!group.owners.empty(), "placement: layer {}: expert {} has no owner: name one", layer,
          group.experts[0]);
  for (size_t i = 0; i < group.owners.size(); ++i) {
    const DeviceId d = group.owners[i];
    require(exists(machine, d), "placement: layer {}: expert {} is owned by {}, which {} lacks",
            layer, group.experts[0], device_name(d), machine.name);
    require(std::count(group.owners.begin(), group.owners.end(), d) == 1,
            "placement: layer {}: expert {} names {} twice", layer, group.experts[0],
            device_name(d));
  }
  if (!group.sliced) return;
  const auto refusal =
      split_refusal("expert FFN", c.expert_dim, static_cast<int>(group.owners.size()));
  require(!refusal, "placement: layer {}: expert {}: {}: choose another number of owners", layer,
          group.experts[0], refusal.value_or(""));
}

void check_numa(const ModelConfig& c, const Machine& machine, const Placement& p) {
  if (p.numa_columns.empty()) return;
  require(std::ssize(p.numa_columns) == machine.n_kinds(),
          "placement: numa_columns are of {} kind(s) of hosts and {} has {}", p.numa_columns.size(),
          machine.name, machine.n_kinds());
  for (int kind = 0; kind < machine.n_kinds(); ++kind) {
    const std::vector<int>& columns = p.numa_columns[kind];
    const HostKind& host = machine.of_kind(kind);
    if (columns.empty()) continue;
    require(columns.size() == host.nodes.size(),
            "placement: numa_columns lists {} slices and {} has {} NUMA nodes", columns.size(),
            host.label.empty() ? machine.name : host.label, host.nodes.size());
    int64_t sum = 0;
    for (const int n : columns) {
      require(n >= 0 && n % kSplitMultiple == 0,
              "placement: a NUMA slice of {} columns: must be a multiple of {}", n, kSplitMultiple);
      sum += n;
    }
    require(sum == c.expert_dim, "placement: numa_columns add up to {} and an expert has {}", sum,
            c.expert_dim);
  }
}

// Calls visit(layer, expert, bytes) for the experts that a device owns.
template <class Visit>
void for_each_expert_on(DeviceId device, const ModelConfig& c, const Placement& p, Visit visit) {
  for (const LayerExperts& l : p.layers)
    for (int layer = l.first; layer <= l.last; ++layer)
      for (const ExpertGroup& g : l.groups) {
        if (!c.is_moe(layer) || std::count(g.owners.begin(), g.owners.end(), device) == 0) continue;
        const int64_t bytes = routed_expert_bytes(c, g.format) /
                              (g.sliced ? static_cast<int64_t>(g.owners.size()) : 1);
        for (const int e : g.experts) visit(layer, e, bytes);
      }
}

// Describes where a device exceeds its memory; empty if not even one expert fits.
std::string first_without_room(const ModelConfig& c, const Placement& p, const DeviceMemory& m) {
  int64_t room = m.free_bytes();
  for_each_expert_on(m.device, c, p, [&](int, int, int64_t bytes) { room += bytes; });
  std::string text;
  if (room < 0) return text;
  for_each_expert_on(m.device, c, p, [&](int layer, int expert, int64_t bytes) {
    if (room >= 0 && room < bytes)
      text = fmt::format(" (it is full from layer {}, expert {} on)", layer, expert);
    room -= bytes;
  });
  return text;
}

}  // namespace

double least_dp_for_compute_bound(const ModelConfig& c) {
  return static_cast<double>(c.router.n_experts) / c.router.n_active;
}

int most_useful_ep(const ModelConfig& c) { return c.router.n_experts + c.n_shared_experts; }

double one_expert_read_seconds(const ModelConfig& c, double read_bytes_per_second) {
  return static_cast<double>(count_parameters(c).one_expert) / read_bytes_per_second;
}

double tokens_per_expert(const ModelConfig& c, double tokens) {
  return tokens * c.router.n_active / c.router.n_experts;
}

double ridge_tokens_per_expert(double ops_per_second, double read_bytes_per_second,
                               double bytes_per_weight) {
  constexpr double kOpsPerWeight = 2;
  return bytes_per_weight * ops_per_second / (kOpsPerWeight * read_bytes_per_second);
}

std::optional<std::string> split_refusal(const char* what, int width, int ways) {
  if (ways == 1 || width % (ways * kSplitMultiple) == 0) return {};
  const double part = static_cast<double>(width) / ways;
  return fmt::format("{} {} / {} = {:g} is not a multiple of {}", what, width, ways, part,
                     kSplitMultiple);
}

std::optional<std::string> tensor_parallel_refusal(const ModelConfig& c, int ways) {
  if (c.mla.n_heads % ways != 0)
    return fmt::format("{} heads cannot be shared by {}", c.mla.n_heads, ways);
  if (auto refusal = split_refusal("attention output", c.mla.n_heads * c.mla.v_dim, ways))
    return refusal;
  if (c.n_dense_layers > 0)
    if (auto refusal = split_refusal("dense FFN", c.dense_dim, ways)) return refusal;
  if (c.router.n_experts > 0 && c.n_shared_experts > 0)
    if (auto refusal = split_refusal("shared expert", c.shared_dim(), ways)) return refusal;
  return {};
}

}  // namespace tandem
