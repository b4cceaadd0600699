// The experts of a backbone's workers as they move between them, for its engine's Rebalancer.
#pragma once
#include <utility>

#include "core/clock.h"
#include "engine/expert_mover.h"
#include "offload/workers/worker_experts.h"

namespace tandem {

class WorkerExpertMover final : public ExpertMover {
 public:
  // The backbone whose workers they are.
  struct Backbone {
    std::vector<std::vector<bool>> on_gpu = {};  // of this process, as keep_on_gpu() takes it
    bool is_whole = true;                        // it has no other ranks
  };
  // The pool outlives the object.
  WorkerExpertMover(WorkerExperts& pool, Backbone backbone)
      : pool_(pool), backbone_(std::move(backbone)) {}

  void load(std::span<const ExpertChange> changes) override;
  MoveStatus status() const override;
  void move() override;
  void keep() override;
  std::shared_ptr<const ExpertHomes> new_homes() override;

 private:
  WorkerExperts& pool_;
  const Backbone backbone_;
  WorkerHomes homes_;  // that the plan of a move is of
  std::vector<int64_t> version_;
  enum class Phase { kIdle, kLoading, kGivenUp, kFailed };
  Phase phase_ = Phase::kIdle;
  MoveStatus status_;  // of the wave
  Clock::time_point begun_{};
};

// For a rank that is not the first of its backbone, which has the workers: nothing moves here.
class FollowingMover final : public ExpertMover {
 public:
  void load(std::span<const ExpertChange>) override { status_.state = MoveStatus::State::kLoaded; }
  MoveStatus status() const override { return status_; }
  void move() override { status_ = {}; }
  void keep() override { status_ = {}; }

 private:
  MoveStatus status_;
};

}  // namespace tandem
