#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <numeric>
#include <vector>

#include "core/rounding.h"
#include "model/cost.h"
#include "model/parameters.h"
#include "offload/balance/assign.h"
#include "offload/balance/hot_experts.h"
#include "offload/plan/assigned_experts.h"
#include "offload/plan/candidates.h"

namespace tandem {

class HotExperts {
 public:
  // Ranks experts by their chance of use in a step of `tokens` tokens.
  HotExperts(const PlanInput& input, WeightFormat format, double tokens, ExpertHosts rest);
  // Number of experts in all layers.
  int64_t size() const { return size_; }
  // Places the first `n` experts on the seats, each layer's use evenly on all of them,
  // and the rest on the hosts' CPUs.
  std::vector<LayerExperts> first(int64_t n, const std::vector<DeviceId>& seats) const;

 private:
  LayerExperts layer(int i, int64_t n, const std::vector<DeviceId>& seats,
                     const std::vector<ExpertGroup>& rest) const;
  const std::vector<int>& order(int layer) const {
    return order_[in_.routing.uniform() ? 0 : layer];
  }
  std::vector<ExpertGroup> rest(const std::vector<int64_t>& n_hot) const;

  const PlanInput& in_;
  WeightFormat format_;
  const ExpertHosts rest_;
  std::vector<int> layers_;                  // MoE layers
  std::vector<std::vector<double>> chance_;  // [MoE layers][experts]; empty under even routing
  std::vector<std::vector<int>> order_;      // [MoE layers] experts, hottest first; one row if even
  std::vector<double> chances_;              // chances of all layers' experts, descending
  int64_t size_;
};

namespace {

// Devices that compute the backbone, and the CPUs that hold experts.
struct Layout {
  std::vector<DeviceId> devices;
  int tp;
  std::vector<DeviceId> cpus;
  bool alike;  // the CPUs
};

std::vector<Layout> layouts_of(const PlanInput& in);
double most_on_gpus(const PlanInput& in, WeightFormat format, int host);
void visit_cpu_details(const PlanInput& in, Placement& p, int64_t home,
                       const CandidateSearch& contest);

// Placements of one layout with some experts on the host's GPUs.
class HotCandidates {
 public:
  HotCandidates(const PlanInput& in, WeightFormat format, const Placement& layout, ExpertHosts rest,
                CandidateSearch& contest);
  void visit();

 private:
  struct Home {
    int64_t id;
    std::vector<LayerExperts> layers;
  };
  const Home& home(int64_t n);
  double speed(int64_t n);
  int64_t fastest();
  int64_t room();
  void enter(int64_t n);

  const PlanInput& in_;
  const WeightFormat format_;
  Placement p_;
  // A rank whose GPU has experts has a part of the backbone, so the GPUs of the backbone share
  // them.
  const std::vector<DeviceId> seats_;
  const std::vector<LayerExperts> on_cpus_;
  CandidateSearch& contest_;
  HotExperts hot_;
  const int64_t n_moe_;
  std::map<int64_t, Home> homes_;  // by number of experts on GPUs
};

}  // namespace

void visit_cpu_candidates(const PlanInput& in, WeightFormat format, CandidateSearch& contest) {
  Placement p;
  p.backbone = stored_format(in.config);
  p.numa_columns = numa_slices_of_kinds(in.config, in.machine);
  p.kv_type = in.workload.kv.value_or(DType::kBF16);
  p.room_to_move = in.workload.experts_move;
  AssignedExperts assigned(in, format);
  const int redundant = in.workload.redundant_experts.value_or(0);
  for (const Layout& layout : layouts_of(in)) {
    if (p.kv_type != DType::kBF16 && layout.devices[0].is_cpu()) continue;
    if (redundant > in.config.router.n_experts * (std::ssize(layout.cpus) - 1)) continue;
    p.stages = {{0, in.config.n_layers - 1, layout.devices, layout.tp}};
    p.layers.clear();
    // A bound that assumes experts take no time.
    const double promise = contest.promise(p, ++contest.n_homes, in.routing);
    if (std::isfinite(promise) && contest.hopeless(promise)) continue;
    const bool hot = layout.cpus.size() == 1 || !layout.alike;
    ExpertHosts hosts;
    if (in.config.router.n_experts > 0) {
      p.kv_tokens = in.workload.context * sequences_a_replica(p, in.workload.concurrency);
      if (hot) hosts = expert_hosts(in, p, format, layout.cpus);
      p.layers = layout.alike ? assigned.on(layout.cpus, redundant)
                              : layers_on_hosts(in, hosts, format, redundant);
    }
    p.expert_rows = rows_travel(p) ? in.workload.expert_rows : ExpertRows::kExact;
    const int64_t home = ++contest.n_homes;
    const double with_experts = contest.promise(p, home, in.routing);
    if (!contest.hopeless(with_experts) || !std::isfinite(with_experts))
      visit_cpu_details(in, p, home, contest);
    const bool one_host = layout.devices.front().host == layout.devices.back().host;
    if (in.config.router.n_experts == 0 || layout.devices[0].is_cpu() || !one_host || !hot)
      continue;
    // Hot experts take at most their part of the time away.
    const double left = 1 - most_on_gpus(in, format, layout.devices[0].host);
    if (std::isfinite(with_experts) && contest.hopeless(left * with_experts)) continue;
    HotCandidates(in, format, p, std::move(hosts), contest).visit();
  }
}

std::vector<int> host_counts(const HostKind& m) {
  std::vector<int> counts;
  for (int n = 1; n < m.hosts; n += std::max(1, n / 8)) counts.push_back(n);
  counts.push_back(m.hosts);
  return counts;
}

std::vector<int> few_host_counts(const HostKind& kind) {
  std::vector<int> counts;
  for (int n = 1; n < kind.hosts; n = n < 4 ? n + 1 : 2 * n) counts.push_back(n);
  counts.push_back(kind.hosts);
  return counts;
}

int64_t sequences_a_replica(const Placement& p, int concurrency) {
  const int dp = p.stages.front().dp();
  return ceil_div(concurrency, dp);
}

NumaColumns numa_slices_of_kinds(const ModelConfig& c, const Machine& m) {
  NumaColumns of_kinds;
  bool any = false;
  for (int kind = 0; kind < m.n_kinds(); ++kind) {
    of_kinds.push_back(numa_slices(c, m.of_kind(kind)));
    any |= !of_kinds.back().empty();
  }
  if (!any) of_kinds.clear();
  return of_kinds;
}

std::vector<int> numa_slices(const ModelConfig& c, const HostKind& m) {
  const int blocks = c.expert_dim / kSplitMultiple;
  if (m.nodes.size() == 1 || c.router.n_experts == 0 || c.expert_dim % kSplitMultiple != 0 ||
      blocks < static_cast<int>(m.nodes.size()))
    return {};
  std::vector<double> rates;
  for (const NumaNode& node : m.nodes) rates.push_back(node.read_bytes_per_second);
  std::vector<int> columns = counts_by_speed(rates, std::vector<int>(rates.size(), blocks), blocks);
  for (int& n : columns) n *= kSplitMultiple;
  return columns;
}

std::vector<int> prefill_chunks(const Workload& w) {
  std::vector<int> chunks = {512};
  for (const int chunk : {2048, 8192})
    if (w.prompt_tokens > chunks.back()) chunks.push_back(chunk);
  return chunks;
}

int least_streamed_chunk(const PlanInput& in, const Placement& p) {
  constexpr int kStep = 64, kMaxTokens = 16384;
  const auto faster = [&](int tokens) {
    Placement with = p;
    const StepShape shape = {static_cast<double>(tokens), static_cast<double>(tokens), true, 1};
    with.stream_from_tokens = 0;
    const double here = predict_step(in, with, shape).moe.seconds;
    with.stream_from_tokens = 1;
    return predict_step(in, with, shape).moe.seconds < here;
  };
  if (!faster(kMaxTokens)) return 0;
  return kStep * least_where(1, kMaxTokens / kStep, [&](int n) { return faster(n * kStep); });
}

namespace {

// Threshold that streams all chunks of a prompt: the length of its mean chunk.
int streamed_from(const Placement& p, const Workload& w) {
  const int chunks = ceil_div(w.prompt_tokens, p.prefill_chunk_tokens);
  return w.prompt_tokens / chunks;
}

// Devices with the backbone for every count of the hosts of a kind: the first host's CPU, the CPUs
// of all hosts as replicas or dividing it, the first GPU, or some GPUs of each host.
std::vector<Layout> backbones_of(const PlanInput& in, int kind, int hosts) {
  const int first_host = in.machine.first_host_of(kind);
  const auto gpus = static_cast<int>(in.machine.of_kind(kind).gpus.size());
  const auto of_each = [&](int first, int n) {
    std::vector<DeviceId> devices;
    for (int host = 0; host < hosts; ++host)
      for (int i = 0; i < n; ++i) devices.push_back({first_host + host, first + i});
    return devices;
  };
  std::vector<Layout> layouts;
  const auto add = [&](std::vector<DeviceId> devices, int tp) {
    layouts.push_back({std::move(devices), tp, {}, true});
  };
  add({{first_host, -1}}, 1);
  if (hosts > 1) {
    add(of_each(-1, 1), 1);
    add(of_each(-1, 1), hosts);
  }
  if (gpus > 0 && hosts > 1) add({{first_host, 0}}, 1);
  for (int n = 1; n <= gpus; ++n) {
    add(of_each(0, n), 1);
    if (n > 1 && !tensor_parallel_refusal(in.config, n)) add(of_each(0, n), n);
  }
  return layouts;
}

// CPUs of hosts of other kinds than `kind`: some of each kind or none, at least one in all. Of more
// than two kinds, all hosts of a kind or none.
std::vector<std::vector<DeviceId>> worker_sets(const Machine& m, int kind) {
  std::vector<std::vector<DeviceId>> sets = {{}};
  for (int other = 0; other < m.n_kinds(); ++other) {
    if (other == kind) continue;
    const std::vector<int> counts = m.n_kinds() > 2 ? std::vector<int>{m.of_kind(other).hosts}
                                                    : few_host_counts(m.of_kind(other));
    const size_t n_sets = sets.size();
    for (size_t i = 0; i < n_sets; ++i)
      for (const int n : counts) {
        std::vector<DeviceId> more = sets[i];
        for (int host = 0; host < n; ++host) more.push_back({m.first_host_of(other) + host, -1});
        std::sort(more.begin(), more.end());
        sets.push_back(std::move(more));
      }
  }
  sets.erase(sets.begin());
  return sets;
}

// The backbone on hosts of every kind, with the experts on the CPUs of the same hosts, or on
// workers of other kinds, with or without the CPUs of those hosts.
std::vector<Layout> layouts_of(const PlanInput& in) {
  const Machine& m = in.machine;
  std::vector<Layout> layouts;
  for (int kind = 0; kind < m.n_kinds(); ++kind) {
    const std::vector<std::vector<DeviceId>> workers = worker_sets(m, kind);
    const std::vector<int> few = few_host_counts(m.of_kind(kind));
    for (const int hosts : host_counts(m.of_kind(kind)))
      for (Layout layout : backbones_of(in, kind, hosts)) {
        std::vector<DeviceId> own;
        for (int host = 0; host < hosts; ++host) own.push_back({m.first_host_of(kind) + host, -1});
        layout.cpus = own;
        layouts.push_back(layout);
        layout.alike = false;
        // Beside workers the backbone is on one device.
        if (in.config.router.n_experts == 0 || layout.devices.size() > 1 ||
            std::find(few.begin(), few.end(), hosts) == few.end())
          continue;
        for (const std::vector<DeviceId>& others : workers)
          for (const bool with_own : {false, true}) {
            layout.cpus = others;
            if (with_own) layout.cpus.insert(layout.cpus.end(), own.begin(), own.end());
            layouts.push_back(layout);
          }
      }
  }
  return layouts;
}

// At most this part of all experts fits the GPUs of a host.
double most_on_gpus(const PlanInput& in, WeightFormat format, int host) {
  const auto experts = static_cast<double>(moe_layers(in.config) * in.config.router.n_experts *
                                           routed_expert_bytes(in.config, format));
  double bytes = 0;
  for (const Gpu& gpu : in.machine.host(host).gpus) bytes += static_cast<double>(gpu.memory_bytes);
  return std::min(1.0, bytes / experts);
}

template <class Visit>
void for_each_pace(const PlanInput& in, Placement& p, Visit visit) {
  const bool gpu = !p.stages[0].devices[0].is_cpu();
  const bool many = p.stages[0].devices.size() > 1;  // ranks, whose steps stay whole beside CPUs
  for (const int chunk : prefill_chunks(in.workload))
    for (const int micro_batches : {1, 2})
      for (const bool streamed : {false, true}) {
        if (!gpu && (micro_batches > 1 || streamed)) continue;
        if (micro_batches > 1 && (in.workload.concurrency == 1 || many)) continue;
        p.prefill_chunk_tokens = chunk;
        p.micro_batches = micro_batches;
        p.stream_from_tokens = streamed ? streamed_from(p, in.workload) : 0;
        visit();
      }
}

template <class Visit>
void for_each_table(Placement& p, Visit visit) {
  const bool gpu = !p.stages[0].devices[0].is_cpu();
  for (const bool embedding_on_cpu : {false, true}) {
    if (!gpu && !embedding_on_cpu) continue;
    p.embedding_on_cpu = embedding_on_cpu;
    p.head_on_cpu = !gpu;
    visit();
  }
}

void visit_cpu_details(const PlanInput& in, Placement& p, int64_t home,
                       const CandidateSearch& contest) {
  for_each_pace(in, p, [&] {
    for_each_table(p, [&] {
      p.kv_tokens = 0;
      contest.enter(p, home);
    });
  });
}

HotCandidates::HotCandidates(const PlanInput& in, WeightFormat format, const Placement& layout,
                             ExpertHosts rest, CandidateSearch& contest)
    : in_(in),
      format_(format),
      p_(layout),
      seats_(layout.stages[0].devices),
      on_cpus_(layout.layers),
      contest_(contest),
      hot_(in, format, std::max(1, in.workload.concurrency), std::move(rest)),
      n_moe_(moe_layers(in.config)) {}

void HotCandidates::visit() {
  for_each_pace(in_, p_, [&] {
    const int64_t best = in_.workload.concurrency > 0 ? fastest() : hot_.size();
    for_each_table(p_, [&] {
      const int64_t most = std::min(room(), hot_.size());
      if (most <= 0) return;
      const int64_t n = std::min(best, most / n_moe_ * n_moe_);
      for (const int64_t one : {n, most, most - n_moe_})
        if (one > 0 &&
            (one != most - n_moe_ || (seats_.size() > 1 && in_.workload.concurrency > 0)))
          enter(one);
      // Smaller numbers leave memory for KV caches when the number of sequences is open.
      if (in_.workload.concurrency == 0)
        for (int64_t some = n_moe_; some < most; some *= 2) enter(some);
    });
  });
}

const HotCandidates::Home& HotCandidates::home(int64_t n) {
  const auto [it, is_new] = homes_.try_emplace(n);
  if (is_new) it->second = {++contest_.n_homes, hot_.first(n, seats_)};
  return it->second;
}

double HotCandidates::speed(int64_t n) {
  const Home& h = home(n);
  p_.layers = h.layers;
  return contest_.score(p_, h.id);
}

// The fastest number of experts on the GPUs, ignoring memory: the time falls with each until it
// rises.
int64_t HotCandidates::fastest() {
  const int64_t a_layer = least_where<int64_t>(0, in_.config.router.n_experts, [&](int64_t n) {
    return speed(n * n_moe_) <= speed((n + 1) * n_moe_);
  });
  // With all experts on GPUs, no exchange with the CPU is needed.
  const int64_t best = a_layer * n_moe_;
  return speed(hot_.size()) < speed(best) ? hot_.size() : best;
}

int64_t HotCandidates::room() {
  p_.kv_tokens = in_.workload.context * sequences_a_replica(p_, in_.workload.concurrency);
  p_.layers = on_cpus_;
  // GPUs keep experts as they are stored.
  const auto expert =
      static_cast<double>(routed_expert_bytes(in_.config, stored_expert_format(in_.config)));
  double most = 1e15;
  for (const DeviceMemory& m : memory_by_device(in_.config, in_.machine, p_))
    for (const DeviceId seat : seats_)
      if (seat == m.device)
        most = std::min(most, std::floor(static_cast<double>(m.free_bytes()) / expert) *
                                  static_cast<double>(seats_.size()));
  const auto fits = static_cast<int64_t>(std::floor(most + 1e-9));
  const bool moves = p_.room_to_move && seats_.size() == 1 && fits < hot_.size();
  return moves ? fits - kHotExpertsAtOnce : fits;
}

void HotCandidates::enter(int64_t n) {
  const Home& h = home(n);
  p_.layers = h.layers;
  p_.kv_tokens = 0;
  contest_.enter(p_, h.id);
}

}  // namespace

HotExperts::HotExperts(const PlanInput& in, WeightFormat format, double tokens, ExpertHosts rest)
    : in_(in), format_(format), rest_(std::move(rest)) {
  const int n_experts = in.config.router.n_experts;
  for (int l = 0; l < in.config.n_layers; ++l)
    if (in.config.is_moe(l)) layers_.push_back(l);
  size_ = static_cast<int64_t>(layers_.size()) * n_experts;
  std::vector<int> order(n_experts);
  std::iota(order.begin(), order.end(), 0);
  order_.assign(in.routing.uniform() ? 1 : layers_.size(), order);
  if (in.routing.uniform()) return;
  chances_.reserve(size_);
  for (size_t i = 0; i < layers_.size(); ++i) {
    std::vector<double>& chance = chance_.emplace_back(n_experts);
    for (int e = 0; e < n_experts; ++e) chance[e] = in.routing.chance(layers_[i], e, tokens);
    std::stable_sort(order_[i].begin(), order_[i].end(),
                     [&](int a, int b) { return chance[a] > chance[b]; });
    chances_.insert(chances_.end(), chance.begin(), chance.end());
  }
  std::sort(chances_.begin(), chances_.end(), std::greater<>());
}

std::vector<LayerExperts> HotExperts::first(int64_t n, const std::vector<DeviceId>& seats) const {
  const auto n_layers = static_cast<int64_t>(layers_.size());
  std::vector<LayerExperts> layers;
  if (in_.routing.uniform()) {
    // Layers get equal numbers, the first `more` one extra; the seat of the first expert rotates.
    const int64_t each = n / n_layers, more = n % n_layers;
    const std::vector<ExpertGroup> on_hosts = rest({each});
    const auto n_seats = static_cast<int64_t>(seats.size());
    const auto first_seat = [&](int64_t i) { return i * n_seats / n_layers; };
    for (int64_t i = 0; i < n_layers;) {
      int64_t end = i + 1;
      while (end < n_layers && (end < more) == (i < more) && first_seat(end) == first_seat(i))
        ++end;
      layers.push_back(layer(static_cast<int>(i), each + (i < more ? 1 : 0), seats, on_hosts));
      layers.back().last = layers_[end - 1];
      i = end;
    }
    return layers;
  }
  const double least = n == 0 ? 2 : chances_[n - 1];
  int64_t left = n;  // experts of exactly chance `least` that are still to be selected
  left -= std::lower_bound(chances_.begin(), chances_.end(), least, std::greater<>()) -
          chances_.begin();
  std::vector<int64_t> n_hot;  // of each layer
  for (int i = 0; i < n_layers; ++i) {
    int64_t m = 0;
    for (const int e : order_[i]) {
      const double chance = chance_[i][e];
      if (chance < least || (chance == least && left == 0)) break;
      if (chance == least) --left;
      ++m;
    }
    n_hot.push_back(m);
  }
  const std::vector<ExpertGroup> on_hosts = rest(n_hot);
  for (int i = 0; i < n_layers; ++i) layers.push_back(layer(i, n_hot[i], seats, on_hosts));
  return layers;
}

// The hosts of the experts that are not hot in every one of the first layers.
std::vector<ExpertGroup> HotExperts::rest(const std::vector<int64_t>& n_hot) const {
  std::vector<bool> cold(in_.config.router.n_experts, false);
  for (size_t i = 0; i < n_hot.size(); ++i)
    for (size_t j = n_hot[i]; j < cold.size(); ++j) cold[order(static_cast<int>(i))[j]] = true;
  std::vector<int> experts;
  for (size_t e = 0; e < cold.size(); ++e)
    if (cold[e]) experts.push_back(static_cast<int>(e));
  return groups_on_hosts(in_, rest_, experts, format_, in_.workload.redundant_experts.value_or(0));
}

LayerExperts HotExperts::layer(int i, int64_t n, const std::vector<DeviceId>& seats,
                               const std::vector<ExpertGroup>& rest) const {
  const bool uniform = in_.routing.uniform();
  const std::vector<int>& order = this->order(i);
  std::vector<ExpertGroup> groups(seats.size() + 1, ExpertGroup{{}, format_, {}});
  for (size_t s = 0; s < seats.size(); ++s)
    groups[s + 1] = {{}, stored_expert_format(in_.config), {seats[s]}};
  std::vector<double> load(seats.size(), 0);
  std::vector<size_t> group_of(order.size(), 0);
  const size_t first_seat = i * seats.size() / layers_.size();
  for (int64_t j = 0; j < std::min<int64_t>(n, std::ssize(order)); ++j) {
    const double use = uniform ? 1 : chance_[i][order[j]];
    double least = 0;
    size_t to = 0;
    for (size_t turn = 0; turn < seats.size(); ++turn) {
      const size_t s =
          first_seat + turn < seats.size() ? first_seat + turn : first_seat + turn - seats.size();
      const double then = load[s] + use;
      if (to == 0 || then < least - 1e-12) least = then, to = s + 1;
    }
    load[to - 1] += use;
    group_of[order[j]] = to;
  }
  for (size_t e = 0; e < group_of.size(); ++e)
    groups[group_of[e]].experts.push_back(static_cast<int>(e));
  std::vector<ExpertGroup> of_layer = rest;
  for (ExpertGroup& group : of_layer)
    std::erase_if(group.experts, [&](int e) { return group_of[e] > 0; });
  of_layer.insert(of_layer.end(), groups.begin() + 1, groups.end());
  std::erase_if(of_layer, [](const ExpertGroup& g) { return g.experts.empty(); });
  return {layers_[i], layers_[i], std::move(of_layer)};
}

}  // namespace tandem
