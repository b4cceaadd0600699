#include <functional>

#include "core/check.h"
#include "offload/plan/cost.h"
#include "offload/plan/plan.h"

namespace tandem {
namespace {

constexpr double kFasterMemory = 1.25;
constexpr int64_t kMoreMemory = 256'000'000'000;

Change try_change(const PlanRequest& r, std::string what,
                  const std::function<void(Machine&, Workload&)>& apply);

}  // namespace

std::vector<Change> possible_changes(const PlanRequest& r, const Plan& plan) {
  std::vector<Change> changes;
  if (!r.machine.gpus.empty())
    changes.push_back(try_change(r, "another " + r.machine.gpus[0].name, [](Machine& m, Workload&) {
      m.gpus.push_back(m.gpus[0]);
      if (m.gpu_link.bytes_per_second == 0) m.gpu_link = {m.gpus[0].d2h_bytes_per_second, 10e-6};
    }));
  changes.push_back(try_change(r, "memory that is a quarter faster", [](Machine& m, Workload&) {
    for (NumaNode& node : m.nodes) node.read_bytes_per_second *= kFasterMemory;
    m.cross_read_bytes_per_second *= kFasterMemory;
    m.one_thread_read_bytes_per_second *= kFasterMemory;
  }));
  changes.push_back(try_change(r, "256 GB more memory", [](Machine& m, Workload&) {
    m.nodes[0].memory_bytes += kMoreMemory;
  }));
  if (!is_i4(stored_expert_format(r.config).dtype) && plan.placement.layers.size() > 0)
    changes.push_back(try_change(r, "experts in int4", [](Machine&, Workload& w) {
      constexpr int kGroup = 64;
      w.experts = WeightFormat{DType::kI4TwoLevel, kGroup};
    }));
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
