// Moves experts between ranks while an engine answers, so that all ranks have as much to compute:
// by how often each expert was chosen it plans new owners on a thread of its own; then, wave by
// wave, all ranks load what comes to them beside the steps, and all switch between two steps.
#pragma once
#include <future>
#include <mutex>
#include <optional>
#include <string>

#include "core/clock.h"
#include "engine/step_runner.h"
#include "scheduling/expert_loads.h"

namespace tandem {

// The last rebalance that was begun.
struct RebalanceReport {
  enum class State {
    kNone,  // there was none
    kPlanning,
    kLoading,  // experts are loaded or moved
    kDone,     // the plan holds; it may be empty
    kFailed,   // loading has failed: the waves that were moved hold, the others do not
  };
  State state = State::kNone;
  int64_t number = 0;  // of rebalances that were begun
  int n_layers = 0, n_waves = 0, n_waves_moved = 0;
  int64_t n_experts = 0;         // to be loaded, on all ranks together
  int64_t n_bytes = 0;           // that all ranks have read
  double before = 1, after = 1;  // balancedness of the window, as it was and with the new owners
  double plan_seconds = 0;
  double load_seconds = 0, prepare_seconds = 0;  // sums over waves, of the slowest rank of each
  double longest_pause_seconds = 0;              // between two steps, for a wave
  std::string error = {};                        // of kFailed
};
// "none", "planning", "loading", "done", "failed"
const char* name_of(RebalanceReport::State state);

// New owners for the experts of ranks, or exchanges between a GPU and the CPU beside it.
RebalancePlan plan_for(const ExpertUses& uses, const ExpertHomes& homes);
// Whether the balancedness of ranks is below this.
bool is_uneven(const ExpertUses& uses, const ExpertHomes& homes, double below);
// Whether the GPU's share of the uses is below this part of what it would be with the most used
// experts.
bool misses_hot_experts(const ExpertUses& uses, const ExpertHomes& homes, double below);

class Rebalancer {
 public:
  struct Options {
    // Whether a rebalance is to begin by itself; none does without it. Fast: it is asked ..
    std::function<bool(const ExpertUses&, const ExpertHomes&)> is_due = {};
    std::chrono::duration<double> period{60};  // .. once this has passed since the last one began
    // Pure; called on another thread.
    std::function<RebalancePlan(const ExpertUses&, const ExpertHomes&)> plan = plan_for;
  };

  // The model moves experts and outlives the object.
  Rebalancer(StepRunner& model, ExpertHomes homes, Options options);
  ~Rebalancer();

  // Thread-safe. Begins a rebalance by these uses, which are not empty; false: one is not ended.
  bool request(std::shared_ptr<const ExpertUses> uses);
  // Thread-safe, and waits for nothing.
  RebalanceReport report() const;
  std::shared_ptr<const ExpertHomes> homes() const;
  // Whether between_steps() has something to do, also while no step is computed.
  bool is_busy() const;

  // Called between two steps, on their thread. `uses`: news of the window; null: there are none.
  // Throws what the model throws, such as GroupError when a rank is lost.
  void between_steps(const std::shared_ptr<const ExpertUses>& news);

 private:
  using State = RebalanceReport::State;
  enum class Phase { kIdle, kPlanning, kLoading, kStopping };
  static constexpr std::chrono::milliseconds kPollInterval{5};
  bool is_due(const ExpertUses& uses) const;
  void take_new_homes();
  void begin();
  void take_plan();
  void load_next();
  void follow_loading();
  void stop(std::string why);
  void move_wave(std::span<const MoveStatus> loaded);
  void end(State state);
  template <class Change>
  void change_report(Change change);

  StepRunner& model_;
  const Options options_;
  Phase phase_ = Phase::kIdle;
  std::future<RebalancePlan> planning_;
  RebalancePlan plan_of_waves_;
  size_t wave_ = 0;  // of the plan, that is loaded
  Clock::time_point began_ = {}, polled_ = {};

  mutable std::mutex mutex_;  // guards the members below
  std::shared_ptr<const ExpertUses> requested_;
  std::shared_ptr<const ExpertHomes> homes_;
  RebalanceReport report_;
  bool busy_ = false;
};

}  // namespace tandem
