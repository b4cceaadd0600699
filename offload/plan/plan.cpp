#include "offload/plan/plan.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <future>
#include <limits>
#include <optional>

#include "core/check.h"
#include "core/memory.h"
#include "core/rounding.h"
#include "model/cost.h"
#include "model/kv_layout.h"
#include "offload/plan/candidates.h"
#include "offload/plan/exhaustive_placement.h"
#include "offload/plan/reasons.h"
#include "offload/plan/roles.h"

namespace tandem {

namespace {

constexpr int kMaxConcurrency = 1 << 16;

// Keeps the best candidate entered so far.
class BestCandidate {
 public:
  BestCandidate(const PlanRequest& request, const Workload& wanted) : r_(request), w_(wanted) {}
  void enter(Placement& p, int64_t home);
  double promise(Placement& p, int64_t home, const RoutingStatistics& routing);
  bool hopeless(double score) const;
  bool beats(const Prediction& then) const;
  double score(const Placement& p, int64_t home) {
    return speed(p, home, w_.concurrency, r_.routing).score;
  }

  std::optional<Placement> placement;
  Workload workload;
  Prediction prediction;
  // Bytes that the candidate closest to fitting lacks, and the device that lacks them.
  int64_t least_missing = std::numeric_limits<int64_t>::max();
  DeviceId fullest;

 private:
  void enter_with(Placement& p, int64_t home, int concurrency);
  bool fits(Placement& p, int concurrency);
  Prediction speed(const Placement& p, int64_t home, int concurrency,
                   const RoutingStatistics& routing);
  std::vector<int> concurrencies(const Placement& p, int64_t home);

  const PlanRequest& r_;
  const Workload w_;
  StepMemo memo_;
};

int n_backbone_ranks(const Machine& machine, const Placement& p);
std::vector<WeightFormat> formats_to_try(const PlanRequest& r);
int least_halved(const PlanInput& in, Placement p);
Plan explained(const PlanRequest& r, const Placement& placement, std::vector<int> standbys);
BestCandidate best_of(const PlanRequest& r, const std::vector<WeightFormat>& formats);
BestCandidate best_in(const PlanRequest& r, WeightFormat format, DType kv);
std::string smaller_workload(const PlanRequest& r, const std::vector<WeightFormat>& formats);
[[noreturn]] void refuse(const PlanRequest& r, const BestCandidate& best,
                         const std::vector<WeightFormat>& formats);

}  // namespace

PlannedPlacement plan_placement(const PlanRequest& r) {
  require_sound(r.workload, r.config);
  if (r.n_standbys != 0) return plan_with_standbys(r);
  const bool has_gpus = r.machine.n_all_gpus() > 0;
  require(r.workload.kv != DType::kF8E4M3 || (has_gpus && takes_fp8_cache(r.config.mla)),
          "a KV cache in fp8: {}; choose bf16",
          !has_gpus ? "only GPUs compute with it, and " + r.machine.name + " has none"
                    : r.model_name + " has larger latents than DeepSeek's");
  const int redundant = r.workload.redundant_experts.value_or(0);
  const int64_t n_ranks = std::max(r.machine.n_hosts(), r.machine.n_all_gpus());
  const int64_t most_redundant = r.config.router.n_experts * (n_ranks - 1);
  require(
      redundant <= most_redundant,
      "--redundant {}: {} has room for {} rank(s), which have at most {} replicas of {} experts, "
      "none twice: ask for fewer",
      redundant, r.machine.name, n_ranks, most_redundant, r.config.router.n_experts);
  const std::vector<WeightFormat> formats = formats_to_try(r);
  BestCandidate best = best_of(r, formats);
  if (!best.placement) refuse(r, best, formats);
  best.placement->model = r.model_name;
  best.placement->machine = r.machine.name;
  best.placement->hosts_of_kinds = hosts_of_kinds(r.machine);
  const PlanInput in = {r.config, r.machine, best.workload, r.routing};
  try_all_placements(in, *best.placement);
  if (best.placement->micro_batches == 2)
    best.placement->micro_batches_from_sequences = least_halved(in, *best.placement);
  return {*best.placement, best.workload, predict(in, *best.placement)};
}

bool meets(const Workload& w, const Prediction& p) {
  return p.tokens_per_second_per_user >= w.tokens_per_second_per_user &&
         (w.first_token_seconds == 0 || p.time_to_first_token_seconds <= w.first_token_seconds);
}

int largest_concurrency(const ModelConfig& config, const Machine& machine, const Placement& p,
                        int64_t context) {
  int64_t sequences = kMaxConcurrency;
  for (const DeviceMemory& m : memory_by_device(config, machine, p))
    for (const Stage& s : p.stages)
      if (std::find(s.devices.begin(), s.devices.end(), m.device) != s.devices.end())
        sequences = std::min(
            sequences, (m.free_bytes() + m.kv_bytes) /
                           (context * kv_bytes_per_token(config, p.kv_type, s.first, s.last)));
  return static_cast<int>(std::clamp<int64_t>(sequences * p.stages[0].dp(), 0, kMaxConcurrency));
}

Plan plan(const PlanRequest& r) {
  const PlannedPlacement planned = plan_placement(r);
  PlanRequest served = r;
  served.workload = planned.workload;
  return explained(served, planned.placement, planned.standbys);
}

Plan assess(const PlanRequest& r, const Placement& placement) {
  require(r.n_standbys == 0,
          "--standbys {}: a placement that is given has none: leave out --placement", r.n_standbys);
  return explained(r, placement, {});
}

namespace {

Plan explained(const PlanRequest& r, const Placement& placement, std::vector<int> standbys) {
  require_sound(r.workload, r.config);
  check_placement(r.config, r.machine, placement);
  Plan plan;
  plan.placement = placement;
  plan.standbys = std::move(standbys);
  plan.workload = r.workload;
  if (plan.workload.concurrency == 0)
    plan.workload.concurrency = static_cast<int>(std::clamp<int64_t>(
        placement.kv_tokens / r.workload.context * placement.stages[0].dp(), 1, kMaxConcurrency));
  const PlanInput in = {r.config, r.machine, plan.workload, r.routing};
  plan.prediction = predict(in, placement);
  plan.drafts = plan_drafts(in, placement, plan.prediction.memory);
  plan.limit = limit_in_words(in, placement, plan.prediction);
  plan.reasons = reasons_in_words(in, placement, plan.prediction);
  plan.balance = balance_of(in, placement);
  if (plan.balance) plan.reasons.push_back(balance_in_words(*plan.balance));
  PlanRequest served = r;
  served.workload = plan.workload;
  if (const auto roles = roles_of(served, placement, plan.prediction)) {
    for (std::string& words : roles_in_words(served, *roles, placement, plan.prediction))
      plan.reasons.push_back(std::move(words));
    for (const int standby : plan.standbys)
      plan.reasons.push_back(standby_in_words(served, placement, standby));
    plan.commands = commands_of(served, *roles, placement, plan.standbys);
  } else if (const std::string why = r.why_not_run ? r.why_not_run(placement) : ""; !why.empty()) {
    plan.reasons.push_back("not executed: " + why);
  }
  plan.reasons.push_back(why_in_words(in, placement, plan.drafts));
  return plan;
}

// The best placement in the first format in which any fits; without a placement if none does. An
// FP8 cache is tried where a BF16 cache leaves the backbone no room on GPUs.
BestCandidate best_of(const PlanRequest& r, const std::vector<WeightFormat>& formats) {
  const bool fp8 = !r.workload.kv && r.machine.n_all_gpus() > 0 && takes_fp8_cache(r.config.mla);
  std::optional<BestCandidate> best;
  for (const WeightFormat format : formats) {
    best.emplace(best_in(r, format, r.workload.kv.value_or(DType::kBF16)));
    const bool on_gpus = best->placement && !best->placement->stages[0].devices[0].is_cpu();
    if (fp8 && !on_gpus) {
      BestCandidate other = best_in(r, format, DType::kF8E4M3);
      if (other.placement && (!best->placement || best->beats(other.prediction)))
        best.emplace(std::move(other));
    }
    if (best->placement) break;
  }
  return std::move(*best);
}

BestCandidate best_in(const PlanRequest& r, WeightFormat format, DType kv) {
  Workload w = r.workload;
  if (w.concurrency == 0 && w.objective == Objective::kLatency) w.concurrency = 1;
  w.kv = kv;
  BestCandidate best(r, w);
  CandidateSearch contest = {[&](Placement& p, int64_t home) { best.enter(p, home); },
                             [&](Placement& p, int64_t home, const RoutingStatistics& routing) {
                               return best.promise(p, home, routing);
                             },
                             [&](const Placement& p, int64_t home) { return best.score(p, home); },
                             [&](double score) { return best.hopeless(score); }};
  const PlanInput in = {r.config, r.machine, w, r.routing};
  if (r.machine.n_all_gpus() > 0) visit_gpu_candidates(in, format, contest);
  visit_cpu_candidates(in, format, contest);
  return best;
}

int n_backbone_ranks(const Machine& machine, const Placement& p) {
  const bool on_cpus = machine.n_all_gpus() == 0;
  int64_t n = 0;
  for (const Stage& stage : p.stages)
    n += std::count_if(stage.devices.begin(), stage.devices.end(),
                       [&](DeviceId d) { return d.is_cpu() == on_cpus; });
  return static_cast<int>(n);
}

// The stored format, then the formats that the engine converts to while loading.
std::vector<WeightFormat> formats_to_try(const PlanRequest& r) {
  if (r.workload.experts) return {*r.workload.experts};
  const WeightFormat stored = stored_expert_format(r.config);
  std::vector<WeightFormat> formats = {stored};
  if (stored.dtype == DType::kBF16) formats.push_back({DType::kI8});
  if (!is_i4(stored.dtype)) formats.push_back(kNarrowest);
  return formats;
}

Prediction BestCandidate::speed(const Placement& p, int64_t home, int concurrency,
                                const RoutingStatistics& routing) {
  Workload w = w_;
  w.concurrency = concurrency;
  return memo_.speed({r_.config, r_.machine, w, routing}, p, home);
}

void BestCandidate::enter(Placement& p, int64_t home) {
  if (r_.n_ranks > 0 && n_backbone_ranks(r_.machine, p) != r_.n_ranks) return;
  if (w_.concurrency > 0) return enter_with(p, home, w_.concurrency);
  for (const int n : concurrencies(p, home)) enter_with(p, home, n);
}

void BestCandidate::enter_with(Placement& p, int64_t home, int concurrency) {
  Prediction then = speed(p, home, concurrency, r_.routing);
  if (placement && !beats(then)) return;
  if (!fits(p, concurrency)) return;
  placement = p;
  workload = w_;
  workload.concurrency = concurrency;
  workload.kv = r_.workload.kv;
  prediction = std::move(then);
}

// True if the prediction is better than the best so far.
bool BestCandidate::beats(const Prediction& then) const {
  const bool new_meets = meets(w_, then), old_meets = meets(w_, prediction);
  return new_meets != old_meets ? new_meets : then.score < prediction.score;
}

bool BestCandidate::fits(Placement& p, int concurrency) {
  p.kv_tokens = w_.context * sequences_a_replica(p, concurrency);
  int64_t missing = 0;
  DeviceId device;
  for (const DeviceMemory& m : memory_by_device(r_.config, r_.machine, p))
    if (-m.free_bytes() > missing) missing = -m.free_bytes(), device = m.device;
  const bool whole = !p.layers.empty() || r_.config.router.n_experts == 0;
  if (whole && missing > 0 && missing < least_missing) least_missing = missing, fullest = device;
  return missing == 0;
}

bool BestCandidate::hopeless(double score) const {
  return std::isinf(score) || (placement && meets(w_, prediction) && score >= prediction.score);
}

// Assumes that embedding and head take no time and the least memory.
double BestCandidate::promise(Placement& p, int64_t home, const RoutingStatistics& routing) {
  p.embedding_on_cpu = true;
  p.head_on_cpu = p.stages[0].devices[0].is_cpu();
  p.prefill_chunk_tokens = prefill_chunks(w_)[0];
  double least = std::numeric_limits<double>::infinity();
  const bool on_cpu = !p.layers.empty() && p.layers[0].groups[0].owners[0].is_cpu();
  int most = w_.concurrency;
  p.kv_tokens = 0;
  if (most == 0) most = largest_concurrency(r_.config, r_.machine, p, w_.context);
  if (fits(p, std::max(1, most)))
    for (const int chunk : prefill_chunks(w_))
      for (const int micro_batches : {1, 2})
        for (const int from : {0, 1}) {
          if ((micro_batches == 2 && most == 1) || (from == 1 && !on_cpu)) continue;
          for (int n = w_.concurrency > 0 ? most : 1;; n = std::min(2 * n, most)) {
            p.prefill_chunk_tokens = chunk;
            p.micro_batches = micro_batches;
            p.stream_from_tokens = from;
            const Prediction then = speed(p, home, n, routing);
            const auto alone = [](const Phase& phase) {
              return 1 - (phase.embedding_seconds + phase.head_seconds) / phase.step_seconds;
            };
            const double step = then.decode.step_seconds * alone(then.decode);
            if (step * w_.tokens_per_second_per_user <= 1) {
              const double decode = w_.output_tokens * step;
              const double prompts =
                  n * double{1} * w_.prompt_tokens / then.prefill.tokens_per_second;
              least = std::min(
                  least, w_.objective == Objective::kLatency
                             ? decode + then.time_to_first_token_seconds * alone(then.prefill)
                             : (decode + prompts * alone(then.prefill)) / w_.output_tokens / n);
            } else if (least > 1e300 && n == 1) {
              least = 1e300;  // fits, but too slow for each user
            }
            if (n == most) break;
          }
        }
  return least;
}

// Concurrencies to try: powers of two while the memory suffices and each user gets the requested
// speed, then the largest such concurrency, to 1/64.
std::vector<int> BestCandidate::concurrencies(const Placement& p, int64_t home) {
  const int most = std::max(1, largest_concurrency(r_.config, r_.machine, p, w_.context));
  std::vector<int> all = {1};
  const auto fast = [&](int n) { return meets(w_, speed(p, home, n, r_.routing)); };
  while (all.back() < most && fast(std::min(2 * all.back(), most)))
    all.push_back(std::min(2 * all.back(), most));
  const int fewest = all.back(), step = std::max(1, fewest / 64);
  if (fewest == most) return all;
  int low = 0, high = (std::min(2 * fewest, most) - fewest) / step;
  while (low < high) {
    const int middle = low + (high - low + 1) / 2;
    if (fast(fewest + middle * step))
      low = middle;
    else
      high = middle - 1;
  }
  if (low > 0) all.push_back(fewest + low * step);
  return all;
}

// Minimum sequences per replica from which two micro-batches are faster, provided that they are
// faster with all sequences.
int least_halved(const PlanInput& in, Placement p) {
  const auto seconds = [&](int n, int micro_batches) {
    Workload w = in.workload;
    w.concurrency = n * p.stages[0].dp();
    p.micro_batches = micro_batches;
    return predict({in.config, in.machine, w, in.routing}, p).decode.step_seconds;
  };
  return least_where(2, std::max(2, in.workload.concurrency / p.stages[0].dp()),
                     [&](int n) { return seconds(n, 2) < seconds(n, 1); });
}

void refuse(const PlanRequest& r, const BestCandidate& best,
            const std::vector<WeightFormat>& formats) {
  require(r.n_ranks == 0,
          "{} does not fit {} with {} tokens of context and its backbone on {} ranks", r.model_name,
          r.machine.name, r.workload.context, r.n_ranks);
  const double missing = gigabytes(best.least_missing);
  // Part of any added memory is reserved too.
  constexpr int64_t kProbe = int64_t{1} << 40;
  const bool cpu = best.fullest.is_cpu();
  const double kept =
      static_cast<double>(reserved_bytes(2 * kProbe, cpu) - reserved_bytes(kProbe, cpu)) / kProbe;
  const bool smaller = r.workload.experts && !is_i4(formats.back().dtype) &&
                       best_of(r, {kNarrowest}).placement.has_value();
  fail(
      "{} does not fit {} with {} tokens of context: even with experts in {}, {} lacks {:.1f} GB; "
      "give it {:.0f} GB more, or choose a smaller model{}{}",
      r.model_name, r.machine.name, r.workload.context, format_name(formats.back()),
      device_name(best.fullest), missing, std::ceil(missing / (1 - kept)),
      smaller ? " or --experts int4" : "", smaller_workload(r, formats));
}

// The largest number of sequences that fits or, with a single sequence, the longest context; empty
// if none does.
std::string smaller_workload(const PlanRequest& r, const std::vector<WeightFormat>& formats) {
  const auto fits = [&](int concurrency, int64_t context) {
    PlanRequest smaller = r;
    smaller.workload.concurrency = concurrency;
    smaller.workload.context = context;
    return best_of(smaller, {formats.back()}).placement.has_value();
  };
  const auto most = [](int64_t fitting, int64_t too_many, const auto& fit) {
    while (too_many - fitting > 1) {
      const int64_t middle = (fitting + too_many) / 2;
      (fit(middle) ? fitting : too_many) = middle;
    }
    return fitting;
  };
  const Workload& w = r.workload;
  if (w.concurrency > 1 && fits(1, w.context))
    return fmt::format(" or --concurrency {}", most(1, w.concurrency, [&](int64_t n) {
                         return fits(static_cast<int>(n), w.context);
                       }));
  constexpr int64_t kStep = 256;
  const int64_t least = ceil_div(int64_t{w.prompt_tokens} + w.output_tokens, kStep);
  if (least * kStep >= w.context || !fits(w.concurrency, least * kStep)) return {};
  return fmt::format(" or --ctx {}",
                     kStep * most(least, ceil_div(w.context, kStep),
                                  [&](int64_t n) { return fits(w.concurrency, n * kStep); }));
}

constexpr double kFasterMemory = 1.25;
constexpr int64_t kMoreMemory = 256'000'000'000;

Change try_change(const PlanRequest& r, std::string what,
                  const std::function<void(Machine&, Workload&)>& apply) {
  Machine machine = r.machine;
  Workload workload = r.workload;
  apply(machine, workload);
  Change change;
  change.what = std::move(what);
  try {
    change.prediction =
        plan_placement({r.model_name, r.config, machine, workload, r.routing, r.n_standbys})
            .prediction;
    change.fits = true;
  } catch (const Error& error) {
    change.refusal = error.what();
  }
  return change;
}

// Plans several changes concurrently.
class Trials {
 public:
  void add(const PlanRequest& r, std::string what, std::function<void(Machine&, Workload&)> apply) {
    trials_.push_back(
        std::async(std::launch::async, [&r, what = std::move(what), apply = std::move(apply)] {
          return try_change(r, what, apply);
        }));
  }
  std::vector<Change> results() {
    std::vector<Change> changes;
    for (std::future<Change>& trial : trials_) changes.push_back(trial.get());
    return changes;
  }

 private:
  std::vector<std::future<Change>> trials_;
};

// Changes of all hosts of a kind and, where the machine has several kinds, one host more.
void add_changes_of(int kind, const PlanRequest& r, bool on_cpu, Trials& trials) {
  const HostKind& hosts = r.machine.of_kind(kind);
  const bool several = r.machine.n_kinds() > 1;
  const std::string each = several           ? fmt::format(" in each {}", hosts.label)
                           : hosts.hosts > 1 ? " in each host"
                                             : "";
  const auto add = [&](std::string what, std::function<void(HostKind&)> change) {
    trials.add(r, std::move(what), [kind, change = std::move(change)](Machine& m, Workload&) {
      change(m.of_kind(kind));
    });
  };
  if (several) add("another " + hosts.label, [](HostKind& m) { ++m.hosts; });
  if (!hosts.gpus.empty())
    add("another " + hosts.gpus[0].name + each, [](HostKind& m) {
      m.gpus.push_back(m.gpus[0]);
      if (m.gpu_link.bytes_per_second == 0) m.gpu_link = {m.gpus[0].d2h_bytes_per_second, 10e-6};
    });
  if (on_cpu)
    add("memory that is a quarter faster" + each, [](HostKind& m) {
      for (NumaNode& node : m.nodes) node.read_bytes_per_second *= kFasterMemory;
      m.cross_read_bytes_per_second *= kFasterMemory;
      m.one_thread_read_bytes_per_second *= kFasterMemory;
    });
  else
    add("GPU memory that is a quarter faster" + (several ? each : ""), [](HostKind& m) {
      for (Gpu& gpu : m.gpus) gpu.read_bytes_per_second *= kFasterMemory;
    });
  add("256 GB more memory" + each, [](HostKind& m) { m.nodes[0].memory_bytes += kMoreMemory; });
}

}  // namespace

std::vector<Change> possible_changes(const PlanRequest& r, const Plan& plan) {
  const ModelConfig& c = r.config;
  const Placement& p = plan.placement;
  // Changes of the machine keep the format; changes of the format keep the machine.
  PlanRequest held = r;
  held.workload.kv = p.kv_type;
  held.workload.expert_rows = p.expert_rows;
  bool on_cpu = p.stages[0].devices[0].is_cpu();
  std::optional<WeightFormat> of_cpus, of_gpus;
  for (const LayerExperts& l : p.layers)
    for (const ExpertGroup& g : l.groups) (g.owners[0].is_cpu() ? of_cpus : of_gpus) = g.format;
  on_cpu |= of_cpus.has_value();
  if (!p.layers.empty()) held.workload.experts = of_cpus ? of_cpus : of_gpus;
  Trials trials;
  for (int kind = 0; kind < r.machine.n_kinds(); ++kind) add_changes_of(kind, held, on_cpu, trials);
  if (!p.stages[0].devices[0].is_cpu() && p.kv_type == DType::kBF16 && takes_fp8_cache(c.mla))
    trials.add(held, "KV cache in fp8", [](Machine&, Workload& w) { w.kv = DType::kF8E4M3; });
  if (rows_travel(p) && p.expert_rows == ExpertRows::kExact)
    trials.add(held, "rows between ranks in fp8",
               [](Machine&, Workload& w) { w.expert_rows = ExpertRows::kFp8; });
  const bool int4 = held.workload.experts && is_i4(held.workload.experts->dtype);
  if (!is_i4(stored_expert_format(c).dtype) && !int4 && !p.layers.empty())
    trials.add(r, "experts in int4", [](Machine&, Workload& w) { w.experts = kNarrowest; });
  std::vector<Change> changes = trials.results();
  // Changes with less than half a percent of effect are not reported.
  const auto same = [](const Phase& a, const Phase& b) {
    return std::abs(a.tokens_per_second / b.tokens_per_second - 1) < 0.005;
  };
  std::erase_if(changes, [&](const Change& change) {
    return change.fits && same(change.prediction.decode, plan.prediction.decode) &&
           same(change.prediction.prefill, plan.prediction.prefill);
  });
  return changes;
}

}  // namespace tandem
