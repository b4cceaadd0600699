// The routed experts that this rank has.
#pragma once
#include <vector>

#include "model/config.h"
#include "model/experts_layout.h"
#include "offload/ranks/expert_exchange.h"
#include "ops/expert_pool.h"

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

// What a rank, number `rank` of its stage, does not have: the experts of other ranks, and what of
// the backbone is not in its share.
Elsewhere elsewhere_of(const ExpertOwners& owners, const ModelConfig& config, int rank,
                       const BackboneShare& share);

// The pool of a rank whose tokens all ranks have: it computes the experts that this rank owns, and
// the forward pass adds the sums of all ranks (Ops::all_reduce).
class RankExperts final : public ExpertPool {
 public:
  // `mine` has at least this rank's experts. References outlive the object.
  RankExperts(const ExpertOwners& owners, int rank, ExpertPool& mine)
      : chooser_(owners), rank_(rank), mine_(mine) {}

  bool waits(Ticket ticket) override { return mine_.waits(ticket); }
  void add_to(Ticket ticket, TensorView y) override { mine_.add_to(ticket, y); }

 private:
  Ticket start(const ExpertBatch& batch) override;

  ReplicaChooser chooser_;
  const int rank_;
  ExpertPool& mine_;
  std::vector<int32_t> ids_[kMaxTickets];  // of the batches on their way
};

}  // namespace tandem
