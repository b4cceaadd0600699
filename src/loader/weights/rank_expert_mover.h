// Moves experts between the host memories of ranks: a rank reads those that come to it from the
// checkpoint, and from the move on all ranks send rows to the new owners.
#pragma once
#include "loader/weights/loading_mover.h"
#include "offload/ranks/expert_owners.h"

namespace tandem {

class RankExpertMover final : public LoadingMover {
 public:
  struct Parts {
    ModelWeights& weights;  // of this rank, which its experts are computed from
    ExpertOwners& owners;   // of this rank's pipeline stage
    int rank;               // of this rank in its stage
    StageLayers layers;     // of its stage
    int n_threads;          // that read and pack
  };
  // References outlive the object.
  RankExpertMover(const Parts& parts, std::unique_ptr<SpareExperts> spare,
                  std::unique_ptr<OutputThread> thread)
      : LoadingMover(std::move(thread)), p_(parts), spare_(std::move(spare)) {}
  ~RankExpertMover() override { stop(); }

 private:
  int begin(std::span<const ExpertChange> changes) override;
  void load_experts(const LoadProgress& progress, MoveStatus& result) override {
    result.n_bytes = spare_->load(moves_.arriving, {p_.n_threads, progress});
  }
  void drop() override { spare_->drop(); }
  void exchange() override;

  const Parts p_;
  const std::unique_ptr<SpareExperts> spare_;
  std::vector<ExpertChange> changes_;
  ExpertMoves moves_;
};

}  // namespace tandem
