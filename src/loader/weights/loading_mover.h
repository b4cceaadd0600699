// A mover whose experts come from the checkpoint: a thread of its own reads them beside the steps.
#pragma once
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>

#include "engine/expert_mover.h"
#include "io/load_jobs.h"
#include "loader/weights/spare_experts.h"
#include "model/backbone_share.h"
#include "scheduling/output_thread.h"

namespace tandem {

// The experts that changes bring to an owner, and those that leave it.
struct ExpertMoves {
  std::vector<ExpertId> arriving, leaving;
};
// The experts that come to an owner and leave it by the changes in these layers. owner: a rank of
// the stage, or kGpuOwner. is_here: whether the owner has an expert now.
ExpertMoves moves_of(std::span<const ExpertChange> changes, StageLayers layers, int owner,
                     const std::function<bool(ExpertId)>& is_here);

class LoadingMover : public ExpertMover {
 public:
  void load(std::span<const ExpertChange> changes) final;
  MoveStatus status() const final;
  void move() final;
  void keep() final;

 protected:
  // The thread has other jobs neither before nor after.
  explicit LoadingMover(std::unique_ptr<OutputThread> thread);
  // Waits for a load to end. What derives from this calls it in its destructor.
  void stop();

 private:
  // Between steps: what is to be loaded from now on. Returns the number of experts.
  virtual int begin(std::span<const ExpertChange> changes) = 0;
  // On the loading thread: loads it, and sets the bytes that it has read and the seconds that it
  // has prepared. Throws what stops it: then nothing is loaded.
  virtual void load_experts(const LoadProgress& progress, MoveStatus& result) = 0;
  // Between steps, or on the loading thread: what was loaded is given up.
  virtual void drop() = 0;
  // Between steps: what was loaded takes its places, and the changes hold.
  virtual void exchange() = 0;
  void run();

  std::atomic<bool> given_up_ = false;
  mutable std::mutex mutex_;  // guards the status
  MoveStatus status_;
  const std::unique_ptr<OutputThread> thread_;
};

}  // namespace tandem
