#include <cmath>
#include <functional>
#include <future>

#include "core/check.h"
#include "model/parameters.h"
#include "offload/plan/cost.h"
#include "offload/plan/plan.h"

namespace tandem {
namespace {

constexpr double kFasterMemory = 1.25;
constexpr int64_t kMoreMemory = 256'000'000'000;

Change try_change(const PlanRequest& r, std::string what,
                  const std::function<void(Machine&, Workload&)>& apply);

// Plans several changes concurrently.
class Trials {
 public:
  void add(const PlanRequest& r, std::string what, std::function<void(Machine&, Workload&)> apply) {
    trials_.push_back(std::async(std::launch::async, [&r, what, apply = std::move(apply)] {
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

}  // namespace

std::vector<Change> possible_changes(const PlanRequest& r, const Plan& plan) {
  const ModelConfig& c = r.config;
  const Placement& p = plan.placement;
  // Changes of the machine keep the format; changes of the format keep the machine.
  PlanRequest held = r;
  held.workload.kv = p.kv_type;
  bool on_cpu = p.stages[0].devices[0].is_cpu();
  for (const LayerExperts& l : p.layers)
    for (const ExpertGroup& g : l.groups) {
      held.workload.experts = g.format;
      on_cpu |= g.owners[0].is_cpu();
    }
  const std::string each = r.machine.hosts > 1 ? " in each host" : "";
  Trials trials;
  if (!r.machine.gpus.empty())
    trials.add(held, "another " + r.machine.gpus[0].name + each, [](Machine& m, Workload&) {
      m.gpus.push_back(m.gpus[0]);
      if (m.gpu_link.bytes_per_second == 0) m.gpu_link = {m.gpus[0].d2h_bytes_per_second, 10e-6};
    });
  if (on_cpu)
    trials.add(held, "memory that is a quarter faster" + each, [](Machine& m, Workload&) {
      for (NumaNode& node : m.nodes) node.read_bytes_per_second *= kFasterMemory;
      m.cross_read_bytes_per_second *= kFasterMemory;
      m.one_thread_read_bytes_per_second *= kFasterMemory;
    });
  else
    trials.add(held, "GPU memory that is a quarter faster", [](Machine& m, Workload&) {
      for (Gpu& gpu : m.gpus) gpu.read_bytes_per_second *= kFasterMemory;
    });
  trials.add(held, "256 GB more memory" + each,
             [](Machine& m, Workload&) { m.nodes[0].memory_bytes += kMoreMemory; });
  if (!p.stages[0].devices[0].is_cpu() && p.kv_type == DType::kBF16 && takes_fp8_cache(c.mla))
    trials.add(held, "KV cache in fp8", [](Machine&, Workload& w) { w.kv = DType::kF8E4M3; });
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

namespace {

Change try_change(const PlanRequest& r, std::string what,
                  const std::function<void(Machine&, Workload&)>& apply) {
  Machine machine = r.machine;
  Workload workload = r.workload;
  apply(machine, workload);
  Change change;
  change.what = std::move(what);
  try {
    change.prediction = plan({r.model_name, r.config, machine, workload, r.routing}).prediction;
    change.fits = true;
  } catch (const Error& error) {
    change.refusal = error.what();
  }
  return change;
}

}  // namespace
}  // namespace tandem
