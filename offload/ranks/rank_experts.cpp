#include "offload/ranks/rank_experts.h"

#include <algorithm>

namespace tandem {

ExpertOwners even_owners(const ModelConfig& config, int n_ranks) {
  const int n = config.router.n_experts;
  ExpertOwners owners(config.n_all_layers(), n);
  for (int layer = 0; layer < config.n_all_layers(); ++layer)
    for (int e = 0; config.is_moe(layer) && e < n; ++e)
      owners.add(layer, e, static_cast<int>((int64_t{e} * n_ranks + n_ranks - 1) / n));
  return owners;
}

Elsewhere experts_elsewhere(const ExpertOwners& owners, const ModelConfig& config, int rank) {
  Elsewhere elsewhere{.experts = {}, .backbone = false};
  elsewhere.experts.resize(config.n_all_layers());
  for (int layer = 0; layer < config.n_all_layers(); ++layer)
    for (int e = 0; config.is_moe(layer) && e < config.router.n_experts; ++e) {
      const std::vector<int>& ranks = owners.ranks(layer, e);
      const bool here = std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
      elsewhere.experts[layer].push_back(!here);
    }
  return elsewhere;
}

RankExperts::RankExperts(ExpertExchange& exchange, ExpertPool& mine, int dim)
    : exchange_(exchange), mine_(mine), sums_(exchange.max_rows() * dim) {}

Ticket RankExperts::start(const ExpertBatch& batch) {
  const ExpertBatch here = exchange_.dispatch(batch);
  sums_of_batch_ = {sums_.data(), here.x.rows, batch.x.cols, batch.x.cols};
  ticket_ = mine_.submit(here);
  return ticket_of(batch.first_row);
}

void RankExperts::add_to(Ticket, TensorView y) {
  std::fill_n(sums_.data(), sums_of_batch_.rows * sums_of_batch_.cols, 0.f);
  mine_.add_to(ticket_, sums_of_batch_);
  exchange_.combine(sums_of_batch_, y);
}

}  // namespace tandem
