#include "offload/simulation/worker_faults.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <set>

#include "core/check.h"
#include "offload/plan/roles.h"
#include "offload/simulation/arrivals.h"

namespace tandem {
namespace {

constexpr double kNever = 1e300;
constexpr double kLostForSeconds = 1;  // before a standby is asked

// Which standbys have loaded which shards.
using Loaded = std::set<std::pair<int, int>>;  // a shard, a host

// The groups of each layer, divided so that no group has experts of several shards.
Placement divided(Placement p, const std::vector<WorkerShard>& shards) {
  std::map<int, int> shard_of;  // expert; of no shard: -1
  for (size_t s = 0; s < shards.size(); ++s)
    for (const int e : shards[s].experts) shard_of[e] = static_cast<int>(s);
  for (LayerExperts& l : p.layers) {
    std::vector<ExpertGroup> groups;
    for (const ExpertGroup& group : l.groups) {
      std::map<int, ExpertGroup> parts;
      for (const int e : group.experts) {
        const auto known = shard_of.find(e);
        ExpertGroup& part = parts[known == shard_of.end() ? -1 : known->second];
        if (part.experts.empty()) part = {{}, group.format, group.owners, group.sliced};
        part.experts.push_back(e);
      }
      for (auto& [shard, part] : parts) groups.push_back(std::move(part));
    }
    l.groups = std::move(groups);
  }
  return p;
}

// Decode steps of a placement while some workers are lost, and standbys have loaded shards.
class Steps {
 public:
  struct Seconds {
    double step = 0, layer = 0;  // 0: an expert has no owner
  };
  Steps(const PlanInput& in, const Placement& p, const std::vector<WorkerShard>& shards)
      : in_(in), p_(divided(p, shards)), shards_(shards) {}
  Seconds with(const std::set<int>& lost, const Loaded& loaded) {
    const auto [known, is_new] = known_.try_emplace({lost, loaded});
    if (is_new) known->second = predicted(lost, loaded);
    return known->second;
  }

 private:
  Seconds predicted(const std::set<int>& lost, const Loaded& loaded) const {
    Placement p = p_;
    for (LayerExperts& l : p.layers)
      for (ExpertGroup& group : l.groups) {
        std::erase_if(group.owners, [&](DeviceId d) { return lost.contains(d.host); });
        for (const auto& [shard, host] : loaded)
          if (std::ranges::binary_search(shards_[shard].experts, group.experts.front()))
            group.owners.push_back({host, -1});
        if (group.owners.empty()) return {};
      }
    const Phase decode = predict_step(in_, p, decode_step_shape(in_.workload, p));
    return {decode.step_seconds, decode.moe.seconds};
  }

  const PlanInput& in_;
  const Placement p_;
  const std::vector<WorkerShard>& shards_;
  std::map<std::pair<std::set<int>, Loaded>, Seconds> known_;
};

class FaultSimulator {
 public:
  FaultSimulator(const PlanInput& in, const Placement& p, const FaultOptions& o)
      : in_(in),
        o_(o),
        hosts_(worker_hosts(p)),
        shards_(worker_shards(in.config, p)),
        steps_(in, p, shards_),
        rng_(o.seed) {
    for (const DeviceMemory& m : memory_by_device(in.config, in.machine, p)) {
      load_seconds_[m.device.host] += load_seconds(m.device.host, m.weights_bytes);
      if (m.device.is_cpu()) room_[m.device.host] = m.free_bytes();
    }
  }

  FaultRun run() {
    run_.without_faults = in_.workload.concurrency / steps_.with({}, {}).step;
    double next = next_fault(0);
    double last_token = 0;
    while (std::ssize(run_.faults) < o_.n_faults || !back_at_.empty()) {
      return_until(now_);
      double left = 1;  // of this step
      bool failed = false;
      while (left > 0 && !failed) {
        const Steps::Seconds seconds = steps_.with(lost(), loaded_);
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
  struct Load {
    int shard, host;
    double end;
  };
  double next_fault(double from) {
    return from + std::exponential_distribution<double>(1 / o_.mean_interval_seconds)(rng_);
  }
  std::set<int> lost() const {
    std::set<int> hosts;
    for (const auto& [host, back] : back_at_) hosts.insert(host);
    return hosts;
  }
  double load_seconds(int host, int64_t bytes) const {
    const double rate = in_.machine.host(host).disk_read_bytes_per_second;
    return rate > 0 ? static_cast<double>(bytes) / rate : 0;
  }
  void return_until(double time) {
    std::erase_if(back_at_, [&](const auto& worker) { return worker.second <= time; });
    std::erase_if(loads_, [&](const Load& load) {
      if (load.end <= time) loaded_.insert({load.shard, load.host});
      return load.end <= time;
    });
  }
  double next_return() const {
    double first = kNever;
    for (const auto& [host, back] : back_at_) first = std::min(first, back);
    for (const Load& load : loads_) first = std::min(first, load.end);
    return first;
  }

  bool has_owner(int shard) const {
    const std::vector<int>& owners = shards_[shard].hosts;
    const auto loaded = loaded_.lower_bound({shard, 0});
    return (loaded != loaded_.end() && loaded->first == shard) ||
           std::any_of(owners.begin(), owners.end(), [&](int h) { return !back_at_.contains(h); });
  }
  const Load* load_of(int Load::*member, int value) const {
    const auto found = std::find_if(loads_.begin(), loads_.end(),
                                    [&](const Load& load) { return load.*member == value; });
    return found == loads_.end() ? nullptr : &*found;
  }

  // Asks the first standby for a shard that has room for it and loads nothing.
  void ask_a_standby(int shard) {
    const double delay = std::min(kLostForSeconds, o_.patience_seconds / 2);
    for (const int host : o_.standbys) {
      if (load_of(&Load::host, host) || room_[host] < shards_[shard].bytes) continue;
      room_[host] -= shards_[shard].bytes;
      const double end = now_ + delay + load_seconds(host, shards_[shard].bytes);
      loads_.push_back({shard, host, end});
      run_.faults.back().standby = host;
      run_.faults.back().loaded_at = end;
      return;
    }
  }

  // Waits until a step has all owners. The patience counts for each shard from its loss, and anew
  // while a standby loads it. Returns false if one has run out: the step's answers fail, and the
  // next ones begin when every shard has an owner.
  bool wait_for_owner() {
    std::map<int, double> until;  // by shard
    bool failed = false;
    while (steps_.with(lost(), loaded_).step == 0) {
      double first = kNever;
      for (int shard = 0; shard < std::ssize(shards_); ++shard) {
        if (has_owner(shard)) continue;
        if (!load_of(&Load::shard, shard)) ask_a_standby(shard);
        double& end = until.try_emplace(shard, now_ + o_.patience_seconds).first->second;
        if (const Load* load = load_of(&Load::shard, shard)) end = load->end + o_.patience_seconds;
        first = std::min(first, end);
      }
      failed = failed || next_return() > first;
      now_ = std::max(now_, next_return());
      return_until(now_);
    }
    return !failed;
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
    f.step_seconds = steps_.with(lost(), loaded_).step;
    run_.faults.push_back(f);
    return f.fault == WorkerFault::kDrained ? 0 : seconds.layer / seconds.step;
  }

  FaultRun finish() {
    run_.seconds = now_;
    run_.tokens_per_second = static_cast<double>(n_tokens_) / now_;
    std::sort(gaps_.begin(), gaps_.end());
    run_.longest_gap_seconds = percentile(gaps_, 1);
    run_.p99_gap_seconds = percentile(gaps_, 0.99);
    return std::move(run_);
  }

  const PlanInput& in_;
  const FaultOptions& o_;
  const std::vector<int> hosts_;
  const std::vector<WorkerShard> shards_;
  Steps steps_;
  std::mt19937_64 rng_;
  std::map<int, double> load_seconds_;  // by host
  std::map<int, int64_t> room_;         // bytes for what standbys load, by host
  std::vector<Load> loads_;             // that standbys are at
  Loaded loaded_;
  std::map<int, double> back_at_;  // of the lost workers, by host
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
