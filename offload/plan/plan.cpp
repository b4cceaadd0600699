#include "offload/plan/plan.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "core/check.h"
#include "offload/plan/candidates.h"
#include "offload/plan/cost.h"
#include "offload/plan/reasons.h"

namespace tandem {
namespace {

constexpr int kMostConcurrency = 1 << 16;

struct Best {
  std::optional<Placement> placement;
  Workload workload;
  Prediction prediction;
  int64_t least_missing = std::numeric_limits<int64_t>::max();  // bytes, of what does not fit
  Device fullest;                                               // then
};

std::vector<WeightFormat> formats_to_try(const PlanRequest& r);
void compare(const PlanRequest& r, Placement& p, Best& best);
void compare_with(const PlanRequest& r, Placement& p, Workload w, Best& best);
int largest_concurrency(const PlanRequest& r, const Placement& p);
int least_halved(const PlanInput& in, Placement p);
bool meets(const Workload& w, const Prediction& p);
[[noreturn]] void refuse(const PlanRequest& r, const Best& best, WeightFormat format);

}  // namespace

Plan plan(const PlanRequest& r) {
  require_sound(r.workload, r.config);
  const std::vector<WeightFormat> formats = formats_to_try(r);
  Best best;
  for (const WeightFormat format : formats) {
    best = {};
    const auto visit = [&](Placement& p) { compare(r, p, best); };
    const PlanInput in = {r.config, r.machine, r.workload, r.routing};
    visit_cpu_candidates(in, format, visit);
    if (!r.machine.gpus.empty()) visit_gpu_candidates(in, format, visit);
    if (best.placement) break;
  }
  if (!best.placement) refuse(r, best, formats.back());
  best.placement->model = r.model_name;
  best.placement->machine = r.machine.name;
  PlanRequest served = r;
  served.workload = best.workload;
  if (best.placement->micro_batches == 2)
    best.placement->micro_batches_from_sequences =
        least_halved({r.config, r.machine, best.workload, r.routing}, *best.placement);
  return assess(served, *best.placement);
}

Plan assess(const PlanRequest& r, const Placement& placement) {
  require_sound(r.workload, r.config);
  check_placement(r.config, r.machine, placement);
  Plan plan = {placement, r.workload, {}, {}, {}};
  if (plan.workload.concurrency == 0)
    plan.workload.concurrency = static_cast<int>(std::clamp<int64_t>(
        placement.kv_tokens / r.workload.context * placement.stages[0].dp(), 1, kMostConcurrency));
  const PlanInput in = {r.config, r.machine, plan.workload, r.routing};
  plan.prediction = predict(in, placement);
  plan.limit = limit_in_words(in, placement, plan.prediction);
  plan.reasons = reasons_in_words(in, placement, plan.prediction);
  return plan;
}

namespace {

// As stored, then what the engine would convert to at load.
std::vector<WeightFormat> formats_to_try(const PlanRequest& r) {
  if (r.workload.experts) return {*r.workload.experts};
  constexpr int kInt4Group = 64;
  const WeightFormat stored = stored_expert_format(r.config);
  std::vector<WeightFormat> formats = {stored};
  if (stored.dtype == DType::kBF16) formats.push_back({DType::kI8});
  if (!is_i4(stored.dtype)) formats.push_back({DType::kI4TwoLevel, kInt4Group});
  return formats;
}

void compare(const PlanRequest& r, Placement& p, Best& best) {
  Workload w = r.workload;
  if (w.concurrency > 0) return compare_with(r, p, w, best);
  w.concurrency = w.objective == Objective::kLatency ? 1 : std::max(1, largest_concurrency(r, p));
  // The more at a time, the more tokens a second and the fewer for each.
  int fewest = 1, largest = w.tokens_per_second_per_user > 0 ? w.concurrency : 1;
  while (fewest < largest) {
    w.concurrency = fewest + (largest - fewest + 1) / 2;
    if (meets(w, predict({r.config, r.machine, w, r.routing}, p)))
      fewest = w.concurrency;
    else
      largest = w.concurrency - 1;
  }
  if (w.tokens_per_second_per_user > 0) w.concurrency = fewest;
  compare_with(r, p, w, best);
}

void compare_with(const PlanRequest& r, Placement& p, Workload w, Best& best) {
  p.kv_tokens = w.context * sequences_a_replica(p, w.concurrency);
  int64_t missing = 0;
  Device fullest;
  for (const DeviceMemory& m : memory_by_device(r.config, r.machine, p))
    if (-m.free_bytes() > missing) missing = -m.free_bytes(), fullest = m.device;
  if (missing > 0) {
    if (missing < best.least_missing) best.least_missing = missing, best.fullest = fullest;
    return;
  }
  const Prediction prediction = predict({r.config, r.machine, w, r.routing}, p);
  if (best.placement) {
    const bool ours = meets(w, prediction), theirs = meets(best.workload, best.prediction);
    if (ours != theirs ? theirs : prediction.score >= best.prediction.score) return;
  }
  best.placement = p;
  best.workload = w;
  best.prediction = prediction;
}

// How many sequences the memory of every device of the backbone has room for.
int largest_concurrency(const PlanRequest& r, const Placement& p) {
  const int64_t a_layer = r.workload.context * kv_layer_bytes(r.config);
  int64_t sequences = kMostConcurrency;
  for (const DeviceMemory& m : memory_by_device(r.config, r.machine, p))
    for (const Stage& s : p.stages)
      if (std::find(s.devices.begin(), s.devices.end(), m.device) != s.devices.end())
        sequences = std::min(sequences, m.free_bytes() / (a_layer * (s.last - s.first + 1)));
  return static_cast<int>(std::clamp<int64_t>(sequences * p.stages[0].dp(), 0, kMostConcurrency));
}

// From how many sequences a replica on halves are faster, where they are with all.
int least_halved(const PlanInput& in, Placement p) {
  const auto seconds = [&](int n, int micro_batches) {
    Workload w = in.workload;
    w.concurrency = n * p.stages[0].dp();
    p.micro_batches = micro_batches;
    return predict({in.config, in.machine, w, in.routing}, p).decode.step_seconds;
  };
  int fewest = 2;
  int most =
      static_cast<int>(std::max<int64_t>(2, sequences_a_replica(p, in.workload.concurrency)));
  while (fewest < most) {
    const int middle = fewest + (most - fewest) / 2;
    if (seconds(middle, 2) < seconds(middle, 1))
      most = middle;
    else
      fewest = middle + 1;
  }
  return most;
}

bool meets(const Workload& w, const Prediction& p) {
  return p.tokens_per_second_per_user >= w.tokens_per_second_per_user;
}

void refuse(const PlanRequest& r, const Best& best, WeightFormat format) {
  const double missing = static_cast<double>(best.least_missing) * 1e-9;
  // Of what is added a part is kept in reserve too.
  constexpr int64_t kProbe = int64_t{1} << 40;
  const bool cpu = best.fullest.is_cpu();
  const double kept =
      static_cast<double>(reserved_bytes(2 * kProbe, cpu) - reserved_bytes(kProbe, cpu)) / kProbe;
  fail(
      "{} does not fit {} with {} tokens of context: even with experts in {}, {} lacks {:.1f} GB; "
      "give it {:.0f} GB more, or choose a smaller model{}",
      r.model_name, r.machine.name, r.workload.context, format_name(format),
      device_name(best.fullest), missing, std::ceil(missing / (1 - kept)),
      r.workload.experts ? " or --experts int4" : "");
}

}  // namespace
}  // namespace tandem
