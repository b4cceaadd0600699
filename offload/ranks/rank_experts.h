// The routed experts that this rank has.
#pragma once
#include <vector>

#include "core/run_error.h"
#include "model/config.h"
#include "model/experts_layout.h"
#include "offload/cpu_experts.h"
#include "offload/ranks/expert_exchange.h"

namespace tandem {

// Every expert on one of n_ranks ranks, dealt round-robin: routing that chooses among few groups of
// adjacent experts then uses all ranks. Of the 8 experts that R1's routing chooses for a token, the
// busiest of two ranks has 5.1, and 5.4 if each had half of the groups; of four 3.5 and 3.9.
ExpertOwners even_owners(const ModelConfig& config, int n_ranks);

// The owners that a placement names: ranks_of_expert[layer][expert], empty for a dense layer.
// even_owners() if it is empty.
ExpertOwners owners_of(const std::vector<std::vector<std::vector<int>>>& ranks_of_expert,
                       const ModelConfig& config, int n_ranks, RankHosts hosts = {},
                       ReplicaChoice choice = ReplicaChoice::kNearest);

// Owners where workers have some of the experts, on_workers[layer][expert]: the first rank has
// their rows computed, and the other experts are dealt round-robin.
std::vector<std::vector<std::vector<int>>> ranks_beside_workers(
    const std::vector<std::vector<bool>>& on_workers, int n_ranks);

// What a rank, number `rank` of its stage, does not have: the experts of other ranks, and what of
// the backbone is not in its share.
Elsewhere elsewhere_of(const ExpertOwners& owners, const ModelConfig& config, int rank,
                       const BackboneShare& share);

// The pool of a CPU rank whose tokens all ranks have: it computes the experts that this rank owns,
// and the forward pass adds the sums of all ranks (Ops::all_reduce). Micro-batches take turns on
// all ranks alike, so that they add up in the same order. A step that fails on this rank goes on
// with zeros, because the others compute it too, and end_step() throws.
class RankExperts final : public ExpertPool {
 public:
  struct Parts {  // what it refers to outlives the pool
    const ExpertOwners& owners;
    int rank;
    CpuExperts& mine;               // has at least this rank's experts
    ExpertPool* workers = nullptr;  // uses `mine` and other processes; null: this rank has none
    // How many every step has, or kMeasured; alike on all ranks. 1 where none has workers.
    int micro_batches = 1;
  };
  explicit RankExperts(const Parts& parts) : p_(parts), chooser_(parts.owners) {}

  bool waits(Ticket) override { return n_micro_batches_ > 1; }
  void add_to(Ticket ticket, TensorView y) override;
  void begin_step(std::span<const Batch> replicas, int n_micro_batches) override;
  int micro_batches(std::span<const Batch>, bool) const override { return p_.micro_batches; }
  std::optional<double> seconds_waited() const override;
  std::vector<WorkerStatus> workers() const override;
  void end_step(LayerRange layers, const MicroBatches& step) override;

 private:
  Ticket start(const ExpertBatch& batch) override;

  const Parts p_;
  ReplicaChooser chooser_;
  int n_micro_batches_ = 1;                // of the step
  std::vector<int32_t> ids_[kMaxTickets];  // of the batches on their way
  ExpertBatch own_[kMaxTickets];           // those of this rank's experts
  StepInCommon step_;
};

}  // namespace tandem
