#include "offload/simulation/worker_faults.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <set>

#include "core/check.h"

namespace tandem {
namespace {

constexpr double kNever = 1e300;

// Decode steps of a placement while some workers are lost.
class Steps {
 public:
  struct Seconds {
    double step = 0, layer = 0;  // 0: an expert has no owner
  };
  Steps(const PlanInput& in, const Placement& p) : in_(in), p_(p) {}
  Seconds without(const std::set<int>& lost) {
    const auto [known, is_new] = known_.try_emplace(lost);
    if (is_new) known->second = predicted(lost);
    return known->second;
  }

 private:
  Seconds predicted(const std::set<int>& lost) const {
    Placement p = p_;
    for (LayerExperts& l : p.layers)
      for (ExpertGroup& group : l.groups) {
        std::erase_if(group.owners, [&](DeviceId d) { return lost.contains(d.host); });
        if (group.owners.empty()) return {};
      }
    const Phase decode = predict_step(in_, p, decode_step_shape(in_.workload, p));
    return {decode.step_seconds, decode.moe.seconds};
  }

  const PlanInput& in_;
  const Placement& p_;
  std::map<std::set<int>, Seconds> known_;
};

class FaultSimulator {
 public:
  FaultSimulator(const PlanInput& in, const Placement& p, const FaultOptions& o)
      : in_(in), o_(o), hosts_(worker_hosts(p)), steps_(in, p), rng_(o.seed) {
    const std::vector<DeviceMemory> memory = memory_by_device(in.config, in.machine, p);
    for (const DeviceMemory& m : memory) {
      const double rate = in.machine.host(m.device.host).disk_read_bytes_per_second;
      if (rate > 0) load_seconds_[m.device.host] += static_cast<double>(m.weights_bytes) / rate;
    }
  }

  FaultRun run() {
    run_.without_faults = in_.workload.concurrency / steps_.without({}).step;
    double next = next_fault(0);
    double last_token = 0;
    while (std::ssize(run_.faults) < o_.n_faults || !back_at_.empty()) {
      return_until(now_);
      double left = 1;  // of this step
      bool failed = false;
      while (left > 0 && !failed) {
        const Steps::Seconds seconds = steps_.without(lost());
        if (seconds.step == 0) {
          failed = !wait_for_owner();
          continue;
        }
        const double end = now_ + left * seconds.step;
        if (next > end || std::ssize(run_.faults) == o_.n_faults) {
          now_ = end;
          left = 0;
          continue;
        }
        next = std::max(next, now_);
        left = (end - next) / seconds.step;
        left += lose_a_worker(next, seconds);
        next = next_fault(next);
      }
      if (failed) {
        run_.n_lost += in_.workload.concurrency;
        last_token = now_;
        continue;
      }
      gaps_.push_back(now_ - last_token);
      last_token = now_;
      const auto second = static_cast<size_t>(now_);
      if (run_.tokens_each_second.size() <= second) run_.tokens_each_second.resize(second + 1, 0);
      run_.tokens_each_second[second] += in_.workload.concurrency;
      n_tokens_ += in_.workload.concurrency;
    }
    return finish();
  }

 private:
  double next_fault(double from) {
    return from + std::exponential_distribution<double>(1 / o_.mean_interval_seconds)(rng_);
  }
  std::set<int> lost() const {
    std::set<int> hosts;
    for (const auto& [host, back] : back_at_) hosts.insert(host);
    return hosts;
  }
  void return_until(double time) {
    std::erase_if(back_at_, [&](const auto& worker) { return worker.second <= time; });
  }

  // Waits until a step has all owners, at most as long as the patience allows. Returns false if
  // that was not enough: the step's answers fail.
  bool wait_for_owner() {
    const double until = now_ + o_.patience_seconds;
    while (steps_.without(lost()).step == 0) {
      double first = kNever;
      for (const auto& [host, back] : back_at_) first = std::min(first, back);
      if (first > until) {
        // The next answers begin when an owner is back.
        now_ = until;
        while (steps_.without(lost()).step == 0) {
          double next = kNever;
          for (const auto& [host, back] : back_at_) next = std::min(next, back);
          now_ = std::max(now_, next);
          return_until(now_);
        }
        return false;
      }
      now_ = std::max(now_, first);
      return_until(now_);
    }
    return true;
  }

  // A fault at `time`, within a step that takes `seconds`. Returns what of a step is computed
  // again.
  double lose_a_worker(double time, Steps::Seconds seconds) {
    now_ = time;
    std::vector<int> up;
    for (const int host : hosts_)
      if (!back_at_.contains(host)) up.push_back(host);
    if (up.empty()) return 0;
    SimulatedFault f = {.at = time};
    f.host = up[std::uniform_int_distribution<size_t>(0, up.size() - 1)(rng_)];
    f.fault = static_cast<WorkerFault>(std::uniform_int_distribution<int>(0, 2)(rng_));
    const bool hung = f.fault == WorkerFault::kHung;
    f.back_at = time + (hung ? o_.hung_seconds : 0) + o_.restart_seconds + load_seconds_[f.host];
    back_at_[f.host] = f.back_at;
    if (hung) now_ += o_.deadline_seconds;
    f.step_seconds = steps_.without(lost()).step;
    run_.faults.push_back(f);
    return f.fault == WorkerFault::kDrained ? 0 : seconds.layer / seconds.step;
  }

  FaultRun finish() {
    run_.seconds = now_;
    run_.tokens_per_second = static_cast<double>(n_tokens_) / now_;
    std::sort(gaps_.begin(), gaps_.end());
    if (!gaps_.empty()) {
      run_.longest_gap_seconds = gaps_.back();
      run_.p99_gap_seconds =
          gaps_[static_cast<size_t>(0.99 * static_cast<double>(gaps_.size() - 1))];
    }
    return std::move(run_);
  }

  const PlanInput& in_;
  const FaultOptions& o_;
  const std::vector<int> hosts_;
  Steps steps_;
  std::mt19937_64 rng_;
  std::map<int, double> load_seconds_;  // by host
  std::map<int, double> back_at_;       // of the lost workers, by host
  std::vector<double> gaps_;
  int64_t n_tokens_ = 0;
  double now_ = 0;
  FaultRun run_;
};

}  // namespace

const char* name_of(WorkerFault fault) {
  constexpr const char* kNames[] = {"killed", "hung", "drained"};
  return kNames[static_cast<int>(fault)];
}

FaultRun simulate_faults(const PlanInput& in, const Placement& p, const FaultOptions& o) {
  constexpr int kMostFaults = 10'000;
  constexpr double kMostSeconds = 1e6;
  require(!worker_hosts(p).empty(),
          "faults of workers: this placement has none; choose a machine whose experts are on hosts "
          "without a part of the backbone");
  require(o.n_faults >= 1 && o.n_faults <= kMostFaults, "{} faults: must be 1 to {}", o.n_faults,
          kMostFaults);
  require(o.mean_interval_seconds > 0 && o.mean_interval_seconds <= kMostSeconds,
          "a fault every {:g} s: must be above 0 and at most {:g}", o.mean_interval_seconds,
          kMostSeconds);
  return FaultSimulator(in, p, o).run();
}

}  // namespace tandem
