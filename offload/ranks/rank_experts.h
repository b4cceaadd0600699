// The routed experts of several ranks as one pool: each rank computes its own, and an exchange
// brings rows there and sums back.
#pragma once
#include <memory>
#include <vector>

#include "model/config.h"
#include "model/experts_layout.h"
#include "offload/ranks/expert_exchange.h"

namespace tandem {

// Every expert on one of n_ranks ranks: adjacent experts on the same rank, as many on each as
// possible.
ExpertOwners even_owners(const ModelConfig& config, int n_ranks);

// The experts that `rank` does not have; it has the backbone.
Elsewhere experts_elsewhere(const ExpertOwners& owners, const ModelConfig& config, int rank);

class RankExperts final : public ExpertPool {
 public:
  // `exchange` needs no begin() (ExchangeMode::kAllReduce). `mine` computes this rank's experts,
  // for steps of at least exchange.max_rows() tokens, one ticket at a time. References outlive the
  // object.
  RankExperts(ExpertExchange& exchange, ExpertPool& mine, int dim);

  void add_to(Ticket ticket, TensorView y) override;

 private:
  Ticket start(const ExpertBatch& batch) override;

  ExpertExchange& exchange_;
  ExpertPool& mine_;
  std::vector<float> sums_;  // [max_rows, dim]
  TensorView sums_of_batch_ = {};
  Ticket ticket_ = 0;  // of mine_
};

}  // namespace tandem
