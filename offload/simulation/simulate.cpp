#include "offload/simulation/simulate.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <queue>
#include <random>
#include <set>

#include "comm/host_groups.h"
#include "core/check.h"
#include "model/cost.h"
#include "offload/balance/assign.h"
#include "offload/plan/layer_time.h"

namespace tandem {

namespace {

constexpr int kMaxSimulatedRanks = 4096, kMaxSimulatedLayers = 4096;
constexpr int64_t kMaxChoices = 100'000'000;  // tokens x top_k x layers

void require_sound(const SimulatedCluster& c) {
  require(c.n_ranks >= 1 && c.n_ranks <= kMaxSimulatedRanks && c.n_layers >= 1 &&
              c.n_layers <= kMaxSimulatedLayers && c.tokens_per_rank >= 1,
          "a simulation of {} ranks, {} layers and {} tokens a rank: must be 1 to {}, 1 to {} and "
          "at least 1",
          c.n_ranks, c.n_layers, c.tokens_per_rank, kMaxSimulatedRanks, kMaxSimulatedLayers);
  require(int64_t{c.n_ranks} * c.tokens_per_rank * c.top_k * c.n_layers <= kMaxChoices,
          "a simulation of {} tokens on each of {} ranks through {} layers is too large: take "
          "fewer tokens or layers",
          c.tokens_per_rank, c.n_ranks, c.n_layers);
  require(c.top_k >= 1 && c.top_k <= c.n_experts &&
              (c.balanced || static_cast<int>(c.owners.size()) == c.n_experts),
          "a simulation with top_k {} of {} experts and owners of {} of them: top_k must be at "
          "least 1 and at most the number of experts, and each expert needs owners",
          c.top_k, c.n_experts, c.owners.size());
  const auto is_of_ranks = [&](const std::vector<int>& x) {
    return x.empty() || static_cast<int>(x.size()) == c.n_ranks;
  };
  require(c.n_backbone_ranks >= 0 && c.n_backbone_ranks <= c.n_ranks && is_of_ranks(c.link_of) &&
              is_of_ranks(c.host_of) && (!c.to_all_hosts || !c.host_of.empty()),
          "a simulation of {} ranks with {} backbones, links of {} and hosts of {}", c.n_ranks,
          c.n_backbone_ranks, c.link_of.size(), c.host_of.size());
  require(c.link_bytes_per_second > 0 && c.skew >= 0 && c.skew <= 10,
          "a simulation with links of {} B/s and a skew of {}: must be above 0, and 0 to 10",
          c.link_bytes_per_second, c.skew);
}

int backbones(const SimulatedCluster& c) {
  return c.n_backbone_ranks > 0 ? c.n_backbone_ranks : c.n_ranks;
}
int first_with_experts(const SimulatedCluster& c) {
  return backbones(c) < c.n_ranks ? backbones(c) : 0;
}

// One micro-batch in one layer: copies[from][to] of tokens, each sent once to a rank or, as parts
// for its ranks, to another host; and each rank's expert seconds.
struct Exchange {
  std::vector<std::vector<double>> copies;
  std::vector<double> expert_seconds;
};

class Router {
 public:
  explicit Router(const SimulatedCluster& c)
      : c_(c),
        hosts_(c.host_of.empty() ? HostLayout::one_host(c.n_ranks) : HostLayout(c.host_of)),
        rng_(c.seed),
        order_(c.n_experts),
        owners_(c.owners) {
    std::iota(order_.begin(), order_.end(), 0);
  }
  // Draws a layer's popularity; call before its exchanges.
  void next_layer() {
    std::shuffle(order_.begin(), order_.end(), rng_);
    cumulative_.clear();
    double sum = 0;
    for (int i = 0; i < c_.n_experts; ++i)
      cumulative_.push_back(sum += std::pow(1.0 + i, -c_.skew));
    if (!c_.balanced) return;
    std::vector<double> shares(c_.n_experts);
    for (int i = 0; i < c_.n_experts; ++i)
      shares[order_[i]] = std::min(1.0, c_.top_k * std::pow(1.0 + i, -c_.skew) / sum);
    const int first = first_with_experts(c_);
    owners_ = assign_experts(shares, c_.n_ranks - first, c_.n_redundant);
    for (auto& ranks : owners_)
      for (int& rank : ranks) rank += first;
  }
  Exchange exchange(int tokens) {
    Exchange x{std::vector<std::vector<double>>(c_.n_ranks, std::vector<double>(c_.n_ranks, 0)),
               std::vector<double>(c_.n_ranks, 0)};
    std::vector<std::vector<int>> rows(c_.n_experts);  // [owners] of each expert
    for (int e = 0; e < c_.n_experts; ++e) rows[e].assign(owners_[e].size(), 0);
    std::vector<bool> taken(c_.n_experts, false);
    std::vector<int> chosen, ranks;
    for (int rank = 0; rank < backbones(c_); ++rank)
      for (int token = 0; token < tokens; ++token) {
        chosen.clear();
        while (static_cast<int>(chosen.size()) < c_.top_k) {
          const int e = draw();
          if (taken[e]) continue;
          taken[e] = true;
          chosen.push_back(e);
        }
        ranks.clear();
        for (const int e : chosen) {
          taken[e] = false;
          const auto least = std::min_element(rows[e].begin(), rows[e].end()) - rows[e].begin();
          ++rows[e][least];
          ranks.push_back(owners_[e][least]);
        }
        for (const int to : ranks) x.copies[rank][to] += part_of_row(rank, to, ranks);
        if (c_.to_all_hosts) add_to_other_hosts(rank, ranks, x.copies[rank]);
      }
    for (int e = 0; e < c_.n_experts; ++e)
      for (size_t o = 0; o < rows[e].size(); ++o)
        if (rows[e][o] > 0) x.expert_seconds[owners_[e][o]] += seconds_of_expert(rows[e][o]);
    return x;
  }

 private:
  // The part of a row that counts for each of the ranks of its experts, of which several may be the
  // same: a row is sent once to a rank, or to another host.
  double part_of_row(int from, int to, const std::vector<int>& ranks) const {
    const bool near = hosts_.host_of(from) == hosts_.host_of(to);
    const auto together = [&](int rank) {
      return near ? rank == to : hosts_.host_of(rank) == hosts_.host_of(to);
    };
    return 1. / static_cast<double>(std::count_if(ranks.begin(), ranks.end(), together));
  }
  // The row of a rank to the hosts that have none of its experts.
  void add_to_other_hosts(int from, const std::vector<int>& ranks,
                          std::vector<double>& copies) const {
    std::set<int> there = {hosts_.host_of(from)};
    for (const int rank : ranks) there.insert(hosts_.host_of(rank));
    for (int host = 0; host < hosts_.n_hosts(); ++host)
      if (!there.contains(host)) copies[hosts_.gateway(from, host)] += 1;
  }
  double seconds_of_expert(int rows) const {
    const double computing = rows * c_.expert_seconds_per_row;
    return c_.reading_hides ? std::max(c_.expert_seconds, computing)
                            : c_.expert_seconds + computing;
  }
  int draw() {
    const double at = std::uniform_real_distribution<double>(0, cumulative_.back())(rng_);
    const auto place = std::upper_bound(cumulative_.begin(), cumulative_.end(), at);
    return order_[std::min<int64_t>(place - cumulative_.begin(), c_.n_experts - 1)];
  }

  const SimulatedCluster& c_;
  const HostLayout hosts_;
  std::mt19937_64 rng_;
  std::vector<int> order_;
  std::vector<double> cumulative_;
  std::vector<std::vector<int>> owners_;
};

// Serves one request at a time, in order of arrival.
struct Resource {
  double free_at = 0, busy = 0;
  double run(double from, double seconds) {
    free_at = std::max(from, free_at) + seconds;
    busy += seconds;
    return free_at;
  }
};

class Simulator {
 public:
  explicit Simulator(const SimulatedCluster& c)
      : c_(c), router_(c), link_of_(c.link_of), compute_(c.n_ranks), near_(c.n_ranks), result_() {
    if (link_of_.empty()) {
      link_of_.resize(c.n_ranks);
      std::iota(link_of_.begin(), link_of_.end(), 0);
    }
    link_.resize(*std::max_element(link_of_.begin(), link_of_.end()) + 1);
  }

  Simulation run() {
    n_halves_ = c_.two_batches && c_.tokens_per_rank >= 2 ? 2 : 1;
    result_.layers.resize(c_.n_layers);
    for (int l = 0; l < c_.n_layers; ++l) {
      router_.next_layer();
      exchanges_.emplace_back();
      for (int h = 0; h < n_halves_; ++h) exchanges_[l].push_back(router_.exchange(tokens_of(h)));
      waiting_.emplace_back(n_halves_, Waiting(c_.n_ranks, backbones(c_)));
    }
    for (int h = 0; h < n_halves_; ++h)
      for (int rank = 0; rank < backbones(c_); ++rank) at(0, [=, this] { backbone(0, h, rank); });
    while (!events_.empty()) {
      const Event event = events_.top();
      events_.pop();
      now_ = event.time;
      event.action();
    }
    finish();
    return std::move(result_);
  }

 private:
  struct Event {
    double time;
    int64_t number;  // events at equal times run in the order in which they were scheduled
    std::function<void()> action;
    bool operator<(const Event& o) const {
      return time != o.time ? time > o.time : number > o.number;
    }
  };
  // Messages that each rank still waits for.
  struct Waiting {
    Waiting(int n, int n_backbones) : dispatches(n, n_backbones), combines(n_backbones, n) {}
    std::vector<int> dispatches, combines;
  };

  int tokens_of(int half) const {
    return n_halves_ == 1 ? c_.tokens_per_rank : (c_.tokens_per_rank + (half == 0 ? 1 : 0)) / 2;
  }
  void at(double time, std::function<void()> action) {
    events_.push({time, ++n_events_, std::move(action)});
  }
  static void raise(double& end, double time) { end = std::max(end, time); }

  void backbone(int layer, int half, int rank) {
    if (layer == c_.n_layers) return;
    const double end = compute_[rank].run(
        now_, c_.backbone_seconds + tokens_of(half) * c_.backbone_seconds_per_token);
    raise(result_.layers[layer].backbone_end, end);
    at(end, [=, this] {
      for (int i = 1; i <= c_.n_ranks; ++i) {
        const int to = (rank + i) % c_.n_ranks;  // receivers differ; itself last
        const double copies = exchanges_[layer][half].copies[rank][to];
        send(rank, to, copies * c_.dispatch_bytes, [=, this] { dispatched(layer, half, to); });
      }
    });
  }
  // Empty messages, and messages of ranks with the same link, arrive at once.
  void send(int from, int to, double bytes, std::function<void()> arrived) {
    if (link_of_[from] == link_of_[to] || bytes == 0) return at(now_, std::move(arrived));
    if (!c_.host_of.empty() && c_.host_of[from] == c_.host_of[to]) {
      const double rate = c_.near_bytes_per_second;
      return at(rate > 0 ? near_[from].run(now_, bytes / rate) : now_, std::move(arrived));
    }
    const double sent = link_[link_of_[from]].run(now_, bytes / c_.link_bytes_per_second);
    at(sent + c_.link_latency_seconds, std::move(arrived));
  }
  void dispatched(int layer, int half, int rank) {
    raise(result_.layers[layer].dispatch_end, now_);
    if (--waiting_[layer][half].dispatches[rank] > 0) return;
    const double end = compute_[rank].run(now_, exchanges_[layer][half].expert_seconds[rank]);
    raise(result_.layers[layer].experts_end, end);
    at(end, [=, this] {
      for (int i = 1; i <= backbones(c_); ++i) {
        const int to = (rank + i) % backbones(c_);
        const double copies = exchanges_[layer][half].copies[to][rank];
        send(rank, to, copies * c_.combine_bytes, [=, this] { combined(layer, half, to); });
      }
    });
  }
  void combined(int layer, int half, int rank) {
    raise(result_.layers[layer].combine_end, now_);
    if (--waiting_[layer][half].combines[rank] > 0) return;
    raise(result_.seconds, now_);
    backbone(layer + 1, half, rank);
  }

  void finish() {
    double computing = 0, sending = 0;
    for (const Resource& r : compute_) computing += r.busy;
    for (const Resource& r : link_) sending += r.busy;
    result_.compute_share = computing / c_.n_ranks / result_.seconds;
    result_.link_share = sending / std::ssize(link_) / result_.seconds;
    for (int l = 0; l < c_.n_layers; ++l) {
      std::vector<double> all(c_.n_ranks, 0);
      for (const Exchange& x : exchanges_[l])
        for (int rank = 0; rank < c_.n_ranks; ++rank) all[rank] += x.expert_seconds[rank];
      const double largest = *std::max_element(all.begin(), all.end());
      if (largest > 0)
        result_.layers[l].balance = std::accumulate(all.begin(), all.end(), 0.0) /
                                    (c_.n_ranks - first_with_experts(c_)) / largest;
    }
  }

  const SimulatedCluster& c_;
  Router router_;
  std::vector<int> link_of_;                      // [ranks]
  std::vector<Resource> compute_;                 // [ranks]
  std::vector<Resource> near_;                    // [ranks] links to ranks of the same host
  std::vector<Resource> link_;                    // by link_of_
  std::vector<std::vector<Exchange>> exchanges_;  // [layers][micro-batches]
  std::vector<std::vector<Waiting>> waiting_;     // [layers][micro-batches]
  std::priority_queue<Event> events_;
  int64_t n_events_ = 0;
  int n_halves_ = 1;
  double now_ = 0;
  Simulation result_;
};

}  // namespace

Simulation simulate(const SimulatedCluster& cluster) {
  require_sound(cluster);
  return Simulator(cluster).run();
}

std::string simulation_text(const Simulation& s) {
  std::string text = fmt::format("{:<8}{:>14}{:>14}{:>14}{:>14}{:>10}\n", "layer", "backbone ms",
                                 "dispatch ms", "experts ms", "combine ms", "balance");
  for (size_t l = 0; l < s.layers.size(); ++l) {
    const SimulatedLayer& x = s.layers[l];
    text +=
        fmt::format("{:<8}{:>14.3f}{:>14.3f}{:>14.3f}{:>14.3f}{:>10.2f}\n", l, x.backbone_end * 1e3,
                    x.dispatch_end * 1e3, x.experts_end * 1e3, x.combine_end * 1e3, x.balance);
  }
  return text + fmt::format("{:.3f} ms; computing {:.0f} %, links {:.0f} % of the time\n",
                            s.seconds * 1e3, s.compute_share * 100, s.link_share * 100);
}

namespace {

// The backbone's devices, then other devices that own experts.
std::vector<DeviceId> ranks_of(const Placement& p) {
  std::vector<DeviceId> ranks = p.stages[0].devices;
  for (const ExpertGroup& group : p.layers[0].groups)
    for (const DeviceId d : group.owners)
      if (std::find(ranks.begin(), ranks.end(), d) == ranks.end()) ranks.push_back(d);
  return ranks;
}

bool suits(const Placement& p) {
  if (p.stages.size() != 1 || p.stages[0].tp != 1 || p.layers.empty()) return false;
  const std::vector<ExpertGroup>& groups = p.layers[0].groups;
  const bool on_gpus = std::all_of(groups.begin(), groups.end(), [](const ExpertGroup& g) {
    return std::none_of(g.owners.begin(), g.owners.end(), [](DeviceId d) { return d.is_cpu(); });
  });
  const bool on_cpus = std::all_of(groups.begin(), groups.end(), [](const ExpertGroup& g) {
    return !g.sliced &&
           std::all_of(g.owners.begin(), g.owners.end(), [](DeviceId d) { return d.is_cpu(); });
  });
  const std::vector<DeviceId> ranks = ranks_of(p);
  const bool several_hosts = ranks.front().host != ranks.back().host;
  return ranks.size() > 1 && !ranks[0].is_cpu() && (on_gpus || (on_cpus && several_hosts));
}

}  // namespace

SimulatedCluster cluster_of(const PlanInput& in, const Placement& p, double skew) {
  require(suits(p),
          "only replicas with experts spread over GPUs, or over the CPUs of several hosts, can be "
          "simulated: ask for --objective throughput and more "
          "--concurrency, or another machine");
  const Stage& stage = p.stages[0];
  const std::vector<DeviceId> ranks = ranks_of(p);
  const auto n = static_cast<int>(stage.devices.size());
  SimulatedCluster c{.n_ranks = static_cast<int>(ranks.size()),
                     .n_backbone_ranks = n,
                     .n_experts = in.config.router.n_experts,
                     .top_k = in.config.router.n_active,
                     .owners = std::vector<std::vector<int>>(in.config.router.n_experts),
                     .skew = skew};
  const std::vector<ExpertGroup>& groups = p.layers[0].groups;
  for (const ExpertGroup& group : groups)
    for (const DeviceId d : group.owners)
      for (const int e : group.experts)
        c.owners[e].push_back(
            static_cast<int>(std::find(ranks.begin(), ranks.end(), d) - ranks.begin()));
  for (const auto& owners : c.owners) c.n_redundant += static_cast<int>(owners.size()) - 1;

  c.tokens_per_rank = std::max(1, in.workload.concurrency / n);
  c.two_batches = p.micro_batches == 2;
  const double context = in.workload.prompt_tokens + in.workload.output_tokens / 2.0;
  const int layer = p.layers[0].first;
  const auto backbone = [&](double tokens) {
    const LayerTime t = LayerModel(in, p, {tokens, context, false, 1}).backbone(stage, layer);
    return t.seconds;
  };
  const double tokens = c.tokens_per_rank, fewer = tokens / 2;
  c.backbone_seconds_per_token = (backbone(tokens) - backbone(fewer)) / (tokens - fewer);
  c.backbone_seconds = backbone(tokens) - tokens * c.backbone_seconds_per_token;

  const DeviceId owner = groups[0].owners[0];
  const WeightFormat format = groups[0].format;
  const Rates rates = rates_of(in.machine, owner, p.numa_columns);
  const double rows = std::max(1.0, tokens * n * c.top_k / c.n_experts);
  const double ratio =
      product_ratio(rates.kind, Product::kExperts, format.dtype, rows, rates.measured);
  c.reading_hides = !owner.is_cpu();
  c.expert_seconds = static_cast<double>(routed_expert_bytes(in.config, format)) /
                     rates.read_bytes_per_second / ratio;
  c.expert_seconds_per_row =
      token_ops(in.config).expert / peak_for(rates, format.dtype, !owner.is_cpu()) / ratio;

  const bool one_host = ranks.front().host == ranks.back().host;
  const Link link = one_host ? in.machine.host(ranks[0].host).gpu_link
                             : in.machine.link(ranks.front().host, ranks.back().host);
  c.link_bytes_per_second = link.bytes_per_second;
  c.link_latency_seconds = link.latency_seconds;
  if (owner.is_cpu())
    for (const DeviceId d : ranks) c.link_of.push_back(d.host);
  else if (!one_host)
    c.link_bytes_per_second /= static_cast<double>(in.machine.host(ranks[0].host).gpus.size());
  if (!one_host) {
    for (const DeviceId d : ranks) c.host_of.push_back(d.host);
    c.near_bytes_per_second = in.machine.host(ranks[0].host).gpu_link.bytes_per_second;
  }
  RowBytes bytes = row_bytes(in.config, p.expert_rows);
  c.to_all_hosts = !one_host && !owner.is_cpu() && c.tokens_per_rank <= kMaxRecordedTokens &&
                   HostLayout(c.host_of).has_equal_hosts();
  if (c.to_all_hosts) bytes.back = encoded_bytes(RowFormat::kF32, in.config.dim);
  c.dispatch_bytes = static_cast<double>(bytes.there);
  c.combine_bytes = static_cast<double>(bytes.back);
  return c;
}

}  // namespace tandem
