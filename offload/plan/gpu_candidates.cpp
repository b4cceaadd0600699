#include <algorithm>
#include <cmath>

#include "core/rounding.h"
#include "model/cost.h"
#include "model/parameters.h"
#include "offload/plan/assigned_experts.h"
#include "offload/plan/candidates.h"
#include "offload/plan/rates.h"

namespace tandem {
namespace {

constexpr size_t kMaxRoutedEntries = 6;

// The first GPUs of some hosts of a kind, the same number of each.
struct Subset {
  int a_host;
  std::vector<DeviceId> gpus;
  // GPUs at the end of `gpus` that are of another kind and hold experts only.
  int n_of_experts = 0;
};

// Choices made before chunks, micro-batches, embedding and head.
struct Base {
  Subset subset;
  enum { kTensorParallel, kExpertParallel, kRoles } kind;
  int tp = 1;           // tensor parallelism of the backbone
  int n_redundant = 0;  // replicas of experts
  int n_ranks = 0;      // ranks that hold experts
};

std::vector<Subset> all_gpu_subsets(const Machine& m);
void add_bases(const PlanInput& in, WeightFormat format, const Subset& s, std::vector<Base>& bases);
Placement placed(const PlanInput& in, WeightFormat format, const Base& base,
                 AssignedExperts& assigned);
bool are_workers(const Placement& without_experts, const std::vector<DeviceId>& devices);
void place_stages(const PlanInput& in, WeightFormat format, const Base& base, Placement& p);
void visit_gpu_details(const PlanInput& in, Placement& p, int64_t home,
                       const CandidateSearch& contest);
std::vector<int> tensor_parallel_ways(const PlanInput& in, const Subset& s);
}  // namespace

// Candidates are visited in order of their bound until none can win. With routing statistics the
// bounds assume even routing, and the best few are assigned by use.
void visit_gpu_candidates(const PlanInput& in, WeightFormat format, CandidateSearch& contest) {
  std::vector<Base> bases;
  for (const Subset& subset : all_gpu_subsets(in.machine)) add_bases(in, format, subset, bases);
  const RoutingStatistics even(in.config);
  const PlanInput evenly = {in.config, in.machine, in.workload, even};
  AssignedExperts assigned_evenly(evenly, format), assigned(in, format);
  struct Entry {
    double promise;
    int64_t home;
    const Base* base;
  };
  std::vector<Entry> entries;
  for (const Base& base : bases) {
    Placement p = placed(evenly, format, base, assigned_evenly);
    const int64_t home = ++contest.n_homes;
    const double promise = contest.promise(p, home, even);
    if (std::isfinite(promise)) entries.push_back({promise, home, &base});
  }
  std::stable_sort(entries.begin(), entries.end(),
                   [](const Entry& a, const Entry& b) { return a.promise < b.promise; });
  if (!in.routing.uniform() && entries.size() > kMaxRoutedEntries)
    entries.resize(kMaxRoutedEntries);
  for (const Entry& e : entries) {
    if (in.routing.uniform() && contest.hopeless(e.promise)) break;
    Placement p = placed(in, format, *e.base, in.routing.uniform() ? assigned_evenly : assigned);
    visit_gpu_details(in, p, in.routing.uniform() ? e.home : ++contest.n_homes, contest);
  }
}

namespace {

std::vector<Subset> gpu_subsets(const Machine& m, int kind) {
  const int first = m.first_host_of(kind);
  std::vector<Subset> subsets;
  for (const int hosts : host_counts(m.of_kind(kind)))
    for (int a_host = 1; a_host <= static_cast<int>(m.of_kind(kind).gpus.size()); ++a_host) {
      Subset s = {a_host, {}};
      for (int i = 0; i < hosts * a_host; ++i) s.gpus.push_back({first + i / a_host, i % a_host});
      subsets.push_back(std::move(s));
    }
  return subsets;
}

// GPUs of each kind, and the backbone on those of one kind with the experts on all GPUs of some
// hosts of another.
std::vector<Subset> all_gpu_subsets(const Machine& m) {
  std::vector<Subset> all;
  for (int kind = 0; kind < m.n_kinds(); ++kind) {
    const std::vector<Subset> own = gpu_subsets(m, kind);
    all.insert(all.end(), own.begin(), own.end());
    for (int other = 0; other < m.n_kinds(); ++other) {
      if (other == kind || m.of_kind(other).gpus.empty()) continue;
      const std::vector<DeviceId> gpus = gpu_subsets(m, other).back().gpus;
      for (const int hosts : few_host_counts(m.of_kind(other)))
        for (Subset both : own) {
          both.n_of_experts = hosts * static_cast<int>(m.of_kind(other).gpus.size());
          both.gpus.insert(both.gpus.end(), gpus.begin(), gpus.begin() + both.n_of_experts);
          all.push_back(std::move(both));
        }
    }
  }
  return all;
}

// Splits among consecutive GPUs of one host.
std::vector<int> tensor_parallel_ways(const PlanInput& in, const Subset& s) {
  std::vector<int> ways;
  for (int t = 1; t <= s.a_host; t *= 2)
    if (s.a_host % t == 0 && !tensor_parallel_refusal(in.config, t)) ways.push_back(t);
  return ways;
}

// The most of `n` GPUs that are worth holding experts. Beyond one rank per expert, a rank more only
// helps where an expert's tokens cost more arithmetic than reading it.
int most_expert_ranks(const PlanInput& in, WeightFormat format, const Subset& s) {
  const int n = s.n_of_experts > 0 ? s.n_of_experts : static_cast<int>(s.gpus.size());
  if (n <= most_useful_ep(in.config)) return n;
  const Rates rates = rates_of(in.machine, s.gpus.back(), {});
  const double ridge =
      ridge_tokens_per_expert(peak_for(rates, format.dtype, true), rates.read_bytes_per_second,
                              static_cast<double>(bits_of(format.dtype)) / 8);
  return tokens_per_expert(in.config, in.workload.concurrency) > ridge ? n
                                                                       : in.config.router.n_experts;
}

// Replicas of experts to try: none, and the usual number with all slots filled.
std::vector<int> replica_counts(const PlanInput& in, int n_ranks) {
  const int n_experts = in.config.router.n_experts;
  std::vector<int> counts = {0, round_up(n_experts + kUsualRedundancy, n_ranks) - n_experts};
  if (in.workload.redundant_experts) counts = {*in.workload.redundant_experts};
  std::erase_if(counts, [&](int n) { return n > int64_t{n_experts} * (n_ranks - 1); });
  return counts;
}

void add_bases(const PlanInput& in, WeightFormat format, const Subset& s,
               std::vector<Base>& bases) {
  const ModelConfig& c = in.config;
  const int n = static_cast<int>(s.gpus.size()), n_experts = c.router.n_experts;
  const int asked = in.workload.redundant_experts.value_or(0);
  const int ranks = most_expert_ranks(in, format, s);
  if (s.n_of_experts > 0) {
    // Beside workers the backbone is on one device.
    if (n == s.n_of_experts + 1 && n_experts > 0 && asked <= n_experts * (ranks - 1))
      bases.push_back({s, Base::kRoles, 1, asked, ranks});
    return;
  }
  if (format != stored_expert_format(c)) return;  // GPUs keep experts as they are stored
  const std::vector<int> ways = tensor_parallel_ways(in, s);
  // One replica: a pipeline of stages, each layer and its experts split over consecutive GPUs.
  for (const int tp : ways)
    if (asked == 0 && n / tp <= c.n_layers &&
        (tp == 1 || n_experts == 0 || !split_refusal("expert FFN", c.expert_dim, tp)))
      bases.push_back({s, Base::kTensorParallel, tp});
  if (n == 1 || n_experts == 0) return;
  // Every GPU holds a part of the backbone's replicas, and every rank a part of the experts.
  for (const int n_redundant : replica_counts(in, ranks))
    for (const int tp : ways) bases.push_back({s, Base::kExpertParallel, tp, n_redundant, ranks});
  // The first host's GPU holds only the backbone and the KV cache, those of the others are workers.
  const int64_t memory = in.machine.host(s.gpus[0].host).gpus[0].memory_bytes;
  const int64_t a_gpu = memory - reserved_bytes(memory, false);
  const int64_t slots =
      a_gpu / std::max<int64_t>(1, moe_layers(c) * routed_expert_bytes(c, format));
  const int workers = n - 1;
  if (s.a_host == 1 && slots * workers >= n_experts + asked && workers <= ranks &&
      asked <= n_experts * (workers - 1))
    bases.push_back({s, Base::kRoles, 1, asked, workers});
}

Placement placed(const PlanInput& in, WeightFormat format, const Base& base,
                 AssignedExperts& assigned) {
  const std::vector<DeviceId>& gpus = base.subset.gpus;
  Placement p;
  p.backbone = stored_format(in.config);
  p.kv_type = in.workload.kv.value_or(DType::kBF16);
  p.room_to_move = in.workload.experts_move;
  const int last = in.config.n_layers - 1;
  if (base.kind == Base::kTensorParallel) {
    place_stages(in, format, base, p);
  } else {
    const auto first_rank = gpus.end() - base.n_ranks;
    const auto backbone_end = base.subset.n_of_experts > 0 ? gpus.end() - base.subset.n_of_experts
                              : base.kind == Base::kRoles  ? first_rank
                                                           : gpus.end();
    p.stages = {{0, last, std::vector(gpus.begin(), backbone_end), base.tp}};
    const std::vector<DeviceId> ranks(first_rank, gpus.end());
    p.layers = are_workers(p, ranks) ? layers_on_hosts(in, expert_hosts(in, p, format, ranks),
                                                       format, base.n_redundant)
                                     : assigned.on(ranks, base.n_redundant);
  }
  if (rows_travel(p)) p.expert_rows = in.workload.expert_rows;
  return p;
}

// Whether all are on hosts without a part of the backbone.
bool are_workers(const Placement& without_experts, const std::vector<DeviceId>& devices) {
  return std::none_of(devices.begin(), devices.end(),
                      [&](DeviceId d) { return has_backbone(without_experts, d.host); });
}

void place_stages(const PlanInput& in, WeightFormat format, const Base& base, Placement& p) {
  const ModelConfig& c = in.config;
  const int tp = base.tp, pp = static_cast<int>(base.subset.gpus.size()) / tp;
  for (int s = 0; s < pp; ++s) {
    const int first = c.n_layers * s / pp, last = c.n_layers * (s + 1) / pp - 1;
    const auto begin = base.subset.gpus.begin() + s * tp;
    const std::vector<DeviceId> devices(begin, begin + tp);
    p.stages.push_back({first, last, devices, tp});
    int moe = first;
    while (moe <= last && !c.is_moe(moe)) ++moe;
    if (moe > last) continue;
    ExpertGroup group = {{}, format, devices, tp > 1};
    for (int e = 0; e < c.router.n_experts; ++e) group.experts.push_back(e);
    p.layers.push_back({moe, last, {group}});
  }
}

void visit_gpu_details(const PlanInput& in, Placement& p, int64_t home,
                       const CandidateSearch& contest) {
  // Rows travel between replicas and to workers; the GPUs of one replica add up sums.
  const bool halves =
      in.workload.concurrency != 1 && (p.stages[0].dp() > 1 || !worker_devices(p).empty());
  for (const int chunk : prefill_chunks(in.workload))
    for (const bool embedding_on_cpu : {false, true})
      for (int micro_batches = 1; micro_batches <= (halves ? 2 : 1); ++micro_batches) {
        p.prefill_chunk_tokens = chunk;
        p.embedding_on_cpu = embedding_on_cpu;
        p.micro_batches = micro_batches;
        p.kv_tokens = 0;
        contest.enter(p, home);
      }
}

}  // namespace
}  // namespace tandem
