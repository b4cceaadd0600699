// The experts of a backbone's workers as they move between them, for its engine's Rebalancer.
#pragma once
#include <utility>

#include "core/clock.h"
#include "engine/expert_mover.h"
#include "offload/workers/worker_experts.h"

namespace tandem {

class WorkerExpertMover final : public ExpertMover {
 public:
  // on_gpu: as keep_on_gpu() takes it. The pool outlives the object.
  WorkerExpertMover(WorkerExperts& pool, std::vector<std::vector<bool>> on_gpu)
      : pool_(pool), on_gpu_(std::move(on_gpu)) {}

  void load(std::span<const ExpertChange> changes) override;
  MoveStatus status() const override;
  void move() override;
  void keep() override;
  std::shared_ptr<const ExpertHomes> new_homes() override;

 private:
  WorkerExperts& pool_;
  const std::vector<std::vector<bool>> on_gpu_;
  WorkerHomes homes_;  // that the plan of a move is of
  std::vector<int64_t> version_;
  enum class Phase { kIdle, kLoading, kGivenUp, kFailed };
  Phase phase_ = Phase::kIdle;
  MoveStatus status_;  // of the wave
  Clock::time_point begun_{};
};

}  // namespace tandem
