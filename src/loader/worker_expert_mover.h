// The experts of a backbone's workers as they move between them, for its engine's Rebalancer.
#pragma once
#include "core/clock.h"
#include "engine/expert_mover.h"
#include "offload/workers/worker_experts.h"

namespace tandem {

class WorkerExpertMover final : public ExpertMover {
 public:
  explicit WorkerExpertMover(WorkerExperts& pool) : pool_(pool) {}  // which outlives the object

  void load(std::span<const ExpertChange> changes) override;
  MoveStatus status() const override;
  void move() override;
  void keep() override;
  std::shared_ptr<const ExpertHomes> new_homes() override;

 private:
  WorkerExperts& pool_;
  WorkerHomes homes_;  // that the plan of a move is of
  std::vector<int64_t> version_;
  enum class Phase { kIdle, kLoading, kGivenUp, kFailed };
  Phase phase_ = Phase::kIdle;
  MoveStatus status_;  // of the wave
  Clock::time_point begun_{};
};

}  // namespace tandem
