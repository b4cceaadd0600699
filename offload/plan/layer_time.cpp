#include "offload/plan/layer_time.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "model/cost.h"

namespace tandem {

namespace {

constexpr double kHandOffSeconds = 10e-6;  // GPU to CPU or back, without the copy: assumed

// Number of the stage's devices that share the first host's network.
double of_first_host(const Stage& stage) {
  double n = 0;
  for (const DeviceId d : stage.devices) n += d.host == stage.devices[0].host ? 1 : 0;
  return n;
}

bool has_device_on(const Stage& stage, int host) {
  return std::any_of(stage.devices.begin(), stage.devices.end(),
                     [&](DeviceId d) { return d.host == host; });
}

// Hosts of a stage, whose devices are in the order of hosts.
int n_hosts_of(const Stage& stage) {
  int n = 0;
  for (size_t i = 0; i < stage.devices.size(); ++i)
    n += i == 0 || stage.devices[i].host != stage.devices[i - 1].host;
  return n;
}

// What connects the first `n` devices of a stage: GPUs of one host, or the host's network, which
// its devices share.
Link link_of_devices(const Machine& m, const Stage& stage, int64_t n) {
  const int first = stage.devices[0].host, last = stage.devices[n - 1].host;
  if (first == last) return m.host(first).gpu_link;
  const Link network = m.link(first, last);
  return {network.bytes_per_second / of_first_host(stage), network.latency_seconds};
}

// Rates of the CPUs and of the GPUs of each kind of hosts.
struct RatesOfKinds {
  RatesOfKinds(const Machine& m, const Placement& p) {
    for (int kind = 0; kind < m.n_kinds(); ++kind) {
      const int host = m.first_host_of(kind);
      cpus.push_back(rates_of(m, {host, -1}, p.numa_columns));
      gpus.push_back(m.of_kind(kind).gpus.empty() ? cpus.back() : rates_of(m, {host, 0}, {}));
    }
  }
  const Rates& of(DeviceId d, int kind) const { return d.is_cpu() ? cpus[kind] : gpus[kind]; }

  std::vector<Rates> cpus, gpus;
};

// CudaStreaming has kernels for these formats only.
bool comes_to_gpus(DType format) { return format == DType::kBF16 || format == DType::kF8E4M3; }

}  // namespace

LayerModel::LayerModel(const PlanInput& input, const Placement& placement, StepShape shape)
    : in_(input), p_(placement), shape_(shape) {}

LayerTime LayerModel::layer(const Stage& stage, int layer, const LayerExperts* experts) const {
  const double tokens = shape_.tokens_per_replica;
  const bool halves = p_.micro_batches == 2 && !shape_.prefill &&
                      tokens / shape_.tokens_per_sequence() >= p_.micro_batches_from_sequences;
  return halves ? overlapped(stage, layer, experts, tokens) : chain(stage, layer, experts, tokens);
}

LayerTime LayerModel::backbone(const Stage& stage, int layer) const {
  return chain(stage, layer, nullptr, shape_.tokens_per_replica);
}

LayerTime LayerModel::chain(const Stage& stage, int layer, const LayerExperts* experts,
                            double tokens) const {
  LayerTime t;
  add_backbone(stage, layer, tokens, t);
  for (const double part : t.parts) t.seconds += part;
  if (!experts) return t;
  t.seconds -= t[Part::kShared];
  const ExpertTimes e = expert_times(stage, layer, *experts, tokens);
  t[Part::kGpuExperts] = e.gpu;
  t[Part::kCpuExperts] = e.cpu;
  t[Part::kExchange] = exchange_seconds(stage, e, tokens);
  if (e.streamed.n > 0)
    add_divided(e, t);
  else if (e.other == 0)
    t.seconds += t[Part::kShared] + t[Part::kExchange] + e.own;
  else
    t.seconds += std::max(t[Part::kShared] + e.own, t[Part::kExchange] + e.other);
  return t;
}

// Divides a streamed chunk's experts so that link, GPU and CPU end together (expert_division.h).
// Streaming of the first kStreamedExperts starts while the backbone is still computing.
void LayerModel::add_divided(const ExpertTimes& e, LayerTime& t) {
  const auto& all = e.streamed;
  const double ahead = std::min(t.seconds, all.link * std::min(1.0, kStreamedExperts / all.n));
  const double before = t[Part::kShared] + e.own;  // seconds on the GPU
  const double saved = all.cpu - all.copy;         // CPU seconds saved if all are streamed
  // The fraction of the experts that has arrived when the CPU has computed the others.
  const auto until = [&](double seconds_of_all, double head_start) {
    const double cpu = t[Part::kExchange] + all.cpu + head_start;
    return saved <= 0 ? 0 : std::clamp(cpu / (seconds_of_all + saved), 0.0, 1.0);
  };
  const double brought = std::min(until(all.link, ahead), until(all.gpu, -before));
  t[Part::kStreaming] = brought * all.link;
  t[Part::kGpuExperts] += brought * all.gpu;
  t[Part::kCpuExperts] = std::max(e.cpu, all.cpu - brought * saved);
  t.seconds += std::max({before + brought * all.gpu, brought * all.link - ahead,
                         t[Part::kExchange] + std::max(t[Part::kCpuExperts], e.other)});
}

// Two alternating micro-batches: while the experts of one are computed elsewhere, the other uses
// the backbone. The busiest resource sets the pace, but no micro-batch is faster than its own
// chain.
LayerTime LayerModel::overlapped(const Stage& stage, int layer, const LayerExperts* experts,
                                 double tokens) const {
  const LayerTime half = chain(stage, layer, experts, tokens / 2);
  LayerTime t = half;
  for (double& part : t.parts) part *= 2;
  t.seconds *= 2;
  if (!experts) return t;  // a dense layer overlaps nothing
  const ExpertTimes e = expert_times(stage, layer, *experts, tokens / 2);
  double backbone = e.own;
  for (const Part part : {Part::kProjections, Part::kAttention, Part::kRouter, Part::kShared,
                          Part::kAllReduce, Part::kOverhead})
    backbone += half[part];
  // The backbone's own kernels do the exchange with the CPU; the network does it with other GPUs.
  const double link = e.to_near > 0 || e.to_far > 0 || e.to_workers > 0 ? half[Part::kExchange] : 0;
  backbone += half[Part::kExchange] - link;
  t.seconds = std::max(2 * std::max({backbone, link, e.other}), half.seconds);
  return t;
}

void LayerModel::add_backbone(const Stage& stage, int layer, double tokens, LayerTime& t) const {
  const ModelConfig& c = in_.config;
  const DeviceId device = stage.devices[0];
  const Rates rates = rates_of(in_.machine, device, p_.numa_columns);
  const BackboneBytes bytes = backbone_layer_bytes(c, c.is_moe(layer), p_.backbone);
  const TokenOps ops = token_ops(c);
  const double tp = stage.tp;
  const auto dense = [&](int64_t weights, double token_ops) {
    return product_seconds(rates, Product::kDense, p_.backbone.dtype,
                           {static_cast<double>(weights) / tp, token_ops * tokens / tp, tokens});
  };
  t[Part::kProjections] = dense(bytes.attention, ops.projections);
  const double queries = shape_.prefill ? tokens : shape_.tokens_per_sequence();
  const AttentionWork work = attention_work(c, queries, shape_.context);
  const double n = tokens / queries;
  t[Part::kAttention] =
      together(rates, n * work.bytes / rates.read_bytes_per_second,
               n * work.ops / tp / peak_for(rates, DType::kBF16, !device.is_cpu())) /
      attention_ratio(rates.kind, work.absorbed, shape_.context, rates.measured);
  if (c.is_moe(layer)) {
    t[Part::kRouter] =
        product_seconds(rates, Product::kDense, DType::kBF16,
                        {static_cast<double>(bytes.router), ops.router * tokens, tokens});
    if (bytes.shared > 0) t[Part::kShared] = dense(bytes.shared, ops.shared);
  } else {
    t[Part::kDense] = p_.dense_replicated || stage.dp() == 1
                          ? dense(bytes.dense, ops.dense)
                          : divided_dense_seconds(stage, tokens, rates);
  }
  t[Part::kAllReduce] = all_reduce_seconds(stage, tokens);
  t[Part::kOverhead] = rates.per_layer_seconds;
}

// Every device receives the rows of all replicas and returns its part of their sums.
double LayerModel::divided_dense_seconds(const Stage& stage, double tokens,
                                         const Rates& rates) const {
  const ModelConfig& c = in_.config;
  const auto n = static_cast<double>(stage.devices.size());
  const double total = tokens * stage.dp();
  const BackboneBytes bytes = backbone_layer_bytes(c, false, p_.backbone);
  const Link link = link_of_devices(in_.machine, stage, std::ssize(stage.devices));
  return product_seconds(
             rates, Product::kDense, p_.backbone.dtype,
             {static_cast<double>(bytes.dense) / n, token_ops(c).dense * total / n, total}) +
         2 * (link.latency_seconds + total * c.dim * sizeof(float) / link.bytes_per_second);
}

LayerModel::ExpertTimes LayerModel::expert_times(const Stage& stage, int layer,
                                                 const LayerExperts& experts, double tokens) const {
  const DeviceId backbone = stage.devices[0];
  const double all = tokens * shape_.replicas;
  const double independent =
      in_.routing.independent_tokens(shape_.n_drafts + 1) / (shape_.n_drafts + 1) * all;
  const std::vector<ExpertLoad> loads =
      expert_loads(in_, p_, experts, layer, {all, independent}, backbone);
  const bool stream = shape_.prefill && !backbone.is_cpu() && streams(p_, tokens);
  std::vector<DeviceId> sorted = stage.devices;
  std::sort(sorted.begin(), sorted.end());
  std::vector<bool> is_own;
  is_own.reserve(loads.size());
  for (const ExpertLoad& load : loads)
    is_own.push_back(std::binary_search(sorted.begin(), sorted.end(), load.owner));
  // CPUs of a kind of hosts are alike wherever the backbone is, GPUs of a kind beside others of the
  // backbone or without it.
  struct Numbers {
    int cpus = 0, own_gpus = 0, other_gpus = 0;
  };
  std::vector<Numbers> n_of_kind(in_.machine.n_kinds());
  for (size_t i = 0; i < loads.size(); ++i) {
    Numbers& n = n_of_kind[loads[i].kind];
    ++(loads[i].owner.is_cpu() ? n.cpus : is_own[i] ? n.own_gpus : n.other_gpus);
  }
  const RatesOfKinds rates(in_.machine, p_);
  const bool sliced = experts.groups[0].sliced;
  ExpertTimes e;
  for (size_t i = 0; i < loads.size(); ++i) {
    const ExpertLoad& load = loads[i];
    if (stream && load.owner.is_cpu() && comes_to_gpus(load.format) &&
        has_device_on(stage, load.owner.host)) {
      add_streamed(stage, load, rates.cpus[load.kind], e);
      continue;
    }
    const bool own = is_own[i];
    const Numbers& n = n_of_kind[load.kind];
    const int n_alike = load.owner.is_cpu() ? n.cpus : own ? n.own_gpus : n.other_gpus;
    if (i > 0 && own == is_own[i - 1] && alike(load, loads[i - 1])) continue;
    const double seconds =
        busiest_seconds(rates.of(load.owner, load.kind), load, sliced ? 1 : n_alike);
    double& where = own ? e.own : e.other;
    where = std::max(where, seconds);
    double& kind = load.owner.is_cpu() ? e.cpu : e.gpu;
    kind = std::max(kind, seconds);
  }
  e.sliced = sliced;
  add_ways(stage, loads, e);
  return e;
}

// The stage's GPUs on this host each stream different experts.
void LayerModel::add_streamed(const Stage& stage, const ExpertLoad& load, const Rates& cpu,
                              ExpertTimes& e) const {
  double n_gpus = 0;
  for (const DeviceId d : stage.devices) n_gpus += d.host == load.owner.host ? 1 : 0;
  n_gpus = std::max(1.0, n_gpus);
  const Rates gpu = rates_of(in_.machine, stage.devices[0], {});
  e.streamed.n += load.used;
  const Gpu& receiver = in_.machine.of_kind(load.kind).gpus[0];
  e.streamed.link += load.bytes / (receiver.h2d_bytes_per_second * n_gpus);
  // Copying reads the source, reads the destination for ownership, and writes it.
  e.streamed.copy = std::max(e.streamed.copy, 3 * load.bytes / cpu.read_bytes_per_second);
  e.streamed.cpu = std::max(e.streamed.cpu, busiest_seconds(cpu, load, 1));
  e.streamed.gpu += together(gpu, load.bytes / gpu.read_bytes_per_second, load.stream_op_seconds) /
                    n_gpus /
                    product_ratio(gpu.kind, Product::kExperts, load.format, load.rows / load.used);
}

// Where one replica's expert rows go. A row goes once to each worker, once to each GPU of its host,
// and once to each other host with a part of the backbone, that has one of its experts: with
// probability 1 - (1 - f)^top_k to one with a fraction f of the expert rows.
void LayerModel::add_ways(const Stage& stage, const std::vector<ExpertLoad>& loads,
                          ExpertTimes& e) const {
  const DeviceId backbone = stage.devices[0];
  // Devices that share a replica have its tokens already, and its all-reduce adds their sums.
  const auto replica_end = stage.devices.begin() + stage.tp;
  double all = 0, cpu = 0, near = 0, far = 0, workers = 0;
  std::map<int, double> tokens_of_host, far_rows_of_host;
  const auto uses = [&](double rows) {
    return 1 - std::pow(1 - rows / all, in_.config.router.n_active);
  };
  for (const ExpertLoad& load : loads) all += load.rows;
  if (all <= 0) return;
  for (const ExpertLoad& load : loads) {
    if (std::find(stage.devices.begin(), replica_end, load.owner) != replica_end) continue;
    if (load.owner.host == backbone.host) {
      (load.owner.is_cpu() ? cpu : near) += load.rows;
      if (!load.owner.is_cpu()) e.gpus_a_token += uses(load.rows);
      continue;
    }
    e.far_host = load.owner.host;
    if (has_backbone(p_, load.owner.host)) {
      far += load.rows;
      far_rows_of_host[load.owner.host] += load.rows;
      if (!load.owner.is_cpu()) e.gpus_a_token += uses(load.rows);
      continue;
    }
    workers += load.rows;
    const double tokens = uses(load.rows);
    e.workers_a_token += tokens;
    double& of_host = tokens_of_host[load.owner.host];
    e.most_tokens = std::max(e.most_tokens, of_host += tokens);
    ++e.n_workers;
    if (load.owner.is_cpu() || tokens <= e.most_tokens_of_gpu) continue;
    e.most_tokens_of_gpu = tokens;
    e.busiest_gpu = load.owner;
  }
  e.to_cpu = cpu / all;
  e.to_near = near / all;
  e.to_far = far / all;
  for (const auto& [host, rows] : far_rows_of_host) e.far_hosts_a_token += uses(rows);
  if (far > 0) {
    std::set<int> hosts;
    for (const ExpertLoad& load : loads) hosts.insert(load.owner.host);
    e.n_far_hosts = static_cast<int>(hosts.size());
  }
  e.to_workers = workers / all;
  e.n_owners = static_cast<int>(loads.size());
}

// Seconds to send tokens out and sums back: between a GPU and its host's CPUs as BF16 over the host
// link; between ranks as row_bytes(), once for each GPU of the host, and over the network once for
// each host, whose GPUs send rows on to each other. Steps that GPUs record send rows to all hosts.
double LayerModel::exchange_seconds(const Stage& stage, const ExpertTimes& e, double tokens) const {
  if (e.sliced) return 0;
  const int host = stage.devices[0].host;
  const HostKind& m = in_.machine.host(host);
  const bool gpu_backbone = !stage.devices[0].is_cpu();
  double seconds = e.n_workers > 0 ? worker_seconds(stage, e, tokens) : 0;
  if ((e.to_cpu > 0 || e.to_workers > 0) && gpu_backbone) {
    const Gpu& gpu = m.gpus[0];
    const double bytes = tokens * in_.config.dim * kBf16Bytes;
    seconds +=
        2 * kHandOffSeconds + bytes / gpu.d2h_bytes_per_second + bytes / gpu.h2d_bytes_per_second;
  }
  // Load of the busier side: a backbone rank that sends or, if those are fewer, an expert rank that
  // receives.
  const double busier = std::max(1.0, shape_.replicas / e.n_owners);
  const RowBytes row = row_bytes(in_.config, p_.expert_rows);
  const bool by_hosts = gpu_backbone && e.to_far > 0 && of_first_host(stage) > 1;
  const bool to_all_hosts = by_hosts && shape_.tokens_per_replica <= kMaxRecordedTokens;
  // Sums travel as floats within each of several hosts, and wherever they are reduced.
  const auto row_bytes_of = [&](bool sums_as_floats) {
    const int64_t sum = sums_as_floats ? encoded_bytes(RowFormat::kF32, in_.config.dim) : row.back;
    return static_cast<double>(row.there + sum);
  };
  const double bytes = busier * tokens * row_bytes_of(by_hosts) * e.gpus_a_token;
  double near = 0, far = 0;
  if (e.to_near > 0 && gpu_backbone)
    near = 2 * m.gpu_link.latency_seconds + bytes / m.gpu_link.bytes_per_second;
  if (e.to_far > 0) {
    // Replicas that share their host's network, or whose rows share that of a host with experts.
    const double a_host = std::min(of_first_host(stage) / stage.tp, shape_.replicas);
    const Link link = in_.machine.link(host, e.far_host);
    const double most = std::max({1.0, a_host, shape_.replicas / e.n_far_hosts});
    const double copies = to_all_hosts ? n_hosts_of(stage) - 1 : e.far_hosts_a_token;
    far = 2 * link.latency_seconds +
          tokens * copies * row_bytes_of(to_all_hosts) * most / link.bytes_per_second;
  }
  return seconds + std::max(near, far);
}

// Seconds of the requests to workers and of their answers: exact rows out, and their sums back,
// once for each worker that a token uses. The backbone's host, or that of the workers which most
// tokens use, has more to send.
double LayerModel::worker_seconds(const Stage& stage, const ExpertTimes& e, double tokens) const {
  const Machine& m = in_.machine;
  const Link link = m.link(stage.devices[0].host, e.far_host);
  const double a_host = std::max(1.0, std::min(of_first_host(stage) / stage.tp, shape_.replicas));
  const auto row = static_cast<double>(row_bytes(in_.config, ExpertRows::kExact).both());
  const double rows =
      tokens * std::max(a_host * e.workers_a_token, shape_.replicas * e.most_tokens);
  const double request = m.request_seconds > 0 ? m.request_seconds : kRequestSeconds;
  return 2 * link.latency_seconds + rows * row / link.bytes_per_second +
         requests_seconds(request, e.n_workers) + worker_copy_seconds(e, tokens);
}

// Seconds in which a worker's GPU gets rows from its host, and the host their sums, as floats.
double LayerModel::worker_copy_seconds(const ExpertTimes& e, double tokens) const {
  if (e.most_tokens_of_gpu <= 0) return 0;
  const Gpu& gpu = in_.machine.host(e.busiest_gpu.host).gpus[e.busiest_gpu.gpu];
  const double bytes =
      tokens * shape_.replicas * e.most_tokens_of_gpu * in_.config.dim * kFloatBytes;
  return 2 * kHandOffSeconds + bytes / gpu.h2d_bytes_per_second + bytes / gpu.d2h_bytes_per_second;
}

// Two per layer, after attention and after the FFN, each as reduce-scatter and all-gather: of BF16
// on GPUs, of float on CPUs.
double LayerModel::all_reduce_seconds(const Stage& stage, double tokens) const {
  if (stage.tp == 1) return 0;
  const Link link = link_of_devices(in_.machine, stage, stage.tp);
  const int64_t number_bytes = stage.devices[0].is_cpu() ? kFloatBytes : kBf16Bytes;
  const double bytes = 2 * (stage.tp - 1.0) / stage.tp * tokens * in_.config.dim * number_bytes;
  return 2 * (2 * link.latency_seconds + bytes / link.bytes_per_second);
}

double requests_seconds(double one_request, int n_workers) {
  return one_request * (n_workers + 1) / 2;
}

bool streams(const Placement& p, double chunk_tokens) {
  return p.stream_from_tokens > 0 && chunk_tokens >= p.stream_from_tokens;
}

double embedding_seconds(const PlanInput& in, const Placement& p, double tokens) {
  const DeviceId device = p.stages.front().devices[0];
  const double bytes = tokens * in.config.dim * kBf16Bytes;
  const HostKind& host = in.machine.host(device.host);
  if (!p.embedding_on_cpu && !device.is_cpu())
    return 2 * bytes / host.gpus[device.gpu].read_bytes_per_second;
  const double rate =
      std::min(tokens * host.one_thread_read_bytes_per_second, host.read_bytes_per_second());
  double seconds = 2 * bytes / rate;
  if (!device.is_cpu())
    seconds += kHandOffSeconds + bytes / host.gpus[device.gpu].h2d_bytes_per_second;
  return seconds;
}

double head_seconds(const PlanInput& in, const Placement& p, double rows, double n_replicas) {
  const ModelConfig& c = in.config;
  const Stage& stage = p.stages.back();
  const DeviceId device = stage.devices[0];
  const double ops = token_ops(c).head;
  const auto all = static_cast<double>(embedding_bytes(c));
  const auto product = [&](const Rates& rates, double share, double n) {
    return product_seconds(rates, Product::kDense, DType::kBF16, {all * share, ops * n * share, n});
  };
  if (p.head_on_cpu || device.is_cpu()) {
    const Rates cpu = rates_of(in.machine, {device.host, -1}, p.numa_columns);
    if (device.is_cpu()) return product(cpu, 1, rows);
    return product(cpu, 1, rows * n_replicas / n_hosts_of(stage)) + kHandOffSeconds +
           rows * c.dim * kBf16Bytes / in.machine.host(device.host).gpus[0].d2h_bytes_per_second;
  }
  const Rates gpu = rates_of(in.machine, device, {});
  if (p.head_replicated) return product(gpu, 1.0 / stage.tp, rows);
  // Every device receives all hidden rows and returns its share of the logits.
  const auto n = static_cast<double>(stage.devices.size());
  const double total = rows * n_replicas;
  const Link link = link_of_devices(in.machine, stage, std::ssize(stage.devices));
  const double bytes = total * c.dim * kBf16Bytes + rows * c.vocab * sizeof(float);
  const double exchange = n > 1 ? 2 * link.latency_seconds + bytes / link.bytes_per_second : 0;
  return product(gpu, 1 / n, total) + exchange;
}

double pipeline_seconds(const PlanInput& in, const Placement& p, double tokens) {
  const Machine& m = in.machine;
  double seconds = 0;
  for (size_t i = 1; i < p.stages.size(); ++i) {
    const int from = p.stages[i - 1].devices[0].host, to = p.stages[i].devices[0].host;
    const Link link = from == to ? m.host(from).gpu_link : m.link(from, to);
    seconds += link.latency_seconds + tokens * in.config.dim * kBf16Bytes / link.bytes_per_second;
  }
  return seconds;
}

namespace {

// Use of a group's experts in one step: expected number used, its variance, and rows of tokens.
struct Use {
  double used = 0, variance = 0, rows = 0;
};

template <class EvenChance>
Use use_of(const PlanInput& in, const ExpertGroup& group, int layer, RoutedTokens tokens,
           const EvenChance& even_chance) {
  const double replicas = group.sliced ? 1 : static_cast<double>(group.owners.size());
  Use use;
  const auto add = [&](double share, double chance, double n) {
    use.used += n * chance;
    use.variance += n * chance * (1 - chance);
    use.rows += n * tokens.all * share / replicas;
  };
  if (in.routing.uniform()) {
    add(in.routing.share(layer, 0), even_chance(replicas),
        static_cast<double>(group.experts.size()));
    return use;
  }
  const std::vector<double>* known =
      in.known ? &in.known->of(in.routing, layer, tokens.independent, in.config.router.n_experts)
               : nullptr;
  for (const int e : group.experts) {
    const double share = in.routing.share(layer, e);
    const double chance = replicas != 1 ? chance_of_use(share / replicas, tokens.independent)
                          : known       ? (*known)[e]
                                        : in.routing.chance(layer, e, tokens.independent);
    add(share, chance, 1);
  }
  return use;
}

// Estimated largest of n draws from a normal distribution, clamped to [least, most].
double largest(double mean, double variance, double n, double least, double most) {
  if (n <= 1) return mean;
  return std::clamp(mean + std::sqrt(2 * variance * std::log(n)), std::min(least, most), most);
}

}  // namespace

std::vector<ExpertLoad> expert_loads(const PlanInput& in, const Placement& p,
                                     const LayerExperts& experts, int layer, RoutedTokens tokens,
                                     DeviceId backbone) {
  const Machine& m = in.machine;
  size_t n_gpus = 0;  // of the hosts with most
  for (int kind = 0; kind < m.n_kinds(); ++kind)
    n_gpus = std::max(n_gpus, m.of_kind(kind).gpus.size());
  std::vector<int> index(m.n_hosts() * (n_gpus + 1), -1);
  const double expert_ops = token_ops(in.config).expert;
  const RatesOfKinds rates(m, p);
  const int backbone_kind = m.kind_of(backbone.host);
  // Caches the chance under even routing: most groups have the same number of owners as the
  // previous one.
  double known_replicas = 0, known_chance = 0;
  const auto even_chance = [&](double replicas) {
    if (replicas != known_replicas)
      known_chance = replicas == 1
                         ? in.routing.chance(layer, 0, tokens.independent)
                         : chance_of_use(in.routing.share(layer, 0) / replicas, tokens.independent);
    known_replicas = replicas;
    return known_chance;
  };
  std::vector<ExpertLoad> loads;
  for (const ExpertGroup& group : experts.groups) {
    const Use use = use_of(in, group, layer, tokens, even_chance);
    const double slices = group.sliced ? static_cast<double>(group.owners.size()) : 1;
    const auto bytes = static_cast<double>(routed_expert_bytes(in.config, group.format)) / slices;
    const double ops = use.rows * expert_ops / slices;
    for (const DeviceId d : group.owners) {
      int& i = index[d.host * (n_gpus + 1) + d.gpu + 1];
      if (i < 0) {
        i = static_cast<int>(loads.size());
        loads.push_back({.owner = d, .kind = m.kind_of(d.host)});
      }
      ExpertLoad& load = loads[i];
      load.experts += static_cast<double>(group.experts.size());
      load.used += use.used;
      load.variance += use.variance;
      load.rows += use.rows;
      load.bytes += use.used * bytes;
      load.op_seconds += ops / peak_for(rates.of(d, load.kind), group.format.dtype, !d.is_cpu());
      if (!backbone.is_cpu())
        load.stream_op_seconds +=
            ops / peak_for(rates.gpus[backbone_kind], group.format.dtype, true);
      load.format = group.format.dtype;
    }
  }
  return loads;
}

bool alike(const ExpertLoad& a, const ExpertLoad& b) {
  return a.owner.is_cpu() == b.owner.is_cpu() && a.kind == b.kind && a.experts == b.experts &&
         a.used == b.used && a.variance == b.variance && a.rows == b.rows && a.bytes == b.bytes &&
         a.op_seconds == b.op_seconds && a.format == b.format;
}

double busiest_seconds(const Rates& rates, const ExpertLoad& load, int n_alike) {
  if (load.used <= 0) return 0;
  const double used = largest(load.used, load.variance, n_alike, 1, load.experts);
  const double rows = largest(load.rows, load.rows, n_alike, used, 1e300);
  return together(rates, load.bytes / rates.read_bytes_per_second * used / load.used,
                  load.op_seconds * rows / load.rows) /
         product_ratio(rates.kind, Product::kExperts, load.format, rows / used, rates.measured);
}

}  // namespace tandem
