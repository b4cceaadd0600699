// Moves experts between a GPU and the CPU beside it, or between the GPUs of ranks.
#pragma once
#include "loader/gpu_model.h"
#include "loader/weights/loading_mover.h"
#include "with_gpu/gpu_expert_slots.h"

namespace tandem {

class GpuExpertMover final : public LoadingMover {
 public:
  // What follows the slots when they have changed, between steps.
  struct Followers {
    GpuExpertSlots::Changed places;
    std::function<void()> owners;  // of experts on ranks
  };
  // References of the parts outlive the object.
  GpuExpertMover(GpuMoverParts parts, std::unique_ptr<GpuExpertSlots> slots, Followers followers)
      : LoadingMover(std::move(parts.thread)),
        p_(std::move(parts)),
        slots_(std::move(slots)),
        followers_(std::move(followers)) {}
  ~GpuExpertMover() override { stop(); }

 private:
  int begin(std::span<const ExpertChange> changes) override;
  void load_experts(const LoadProgress& progress, MoveStatus& result) override;
  void drop() override;
  void exchange() override;

  const GpuMoverParts p_;
  const std::unique_ptr<GpuExpertSlots> slots_;
  const Followers followers_;
  std::vector<ExpertChange> changes_;
  ExpertMoves moves_;
};

}  // namespace tandem
