#include "offload/ranks/rank_experts.h"

#include <algorithm>

namespace tandem {

ExpertOwners even_owners(const ModelConfig& config, int n_ranks) {
  const int n = config.router.n_experts;
  ExpertOwners owners(config.n_all_layers(), n);
  for (int layer = 0; layer < config.n_all_layers(); ++layer)
    for (int e = 0; config.is_moe(layer) && e < n; ++e) owners.add(layer, e, e % n_ranks);
  return owners;
}

ExpertOwners owners_of(const std::vector<std::vector<int>>& rank_of_expert,
                       const ModelConfig& config, int n_ranks) {
  if (rank_of_expert.empty()) return even_owners(config, n_ranks);
  ExpertOwners owners(config.n_all_layers(), config.router.n_experts);
  for (int layer = 0; layer < std::ssize(rank_of_expert); ++layer)
    for (int e = 0; e < std::ssize(rank_of_expert[layer]); ++e)
      owners.add(layer, e, rank_of_expert[layer][e]);
  return owners;
}

Elsewhere elsewhere_of(const ExpertOwners& owners, const ModelConfig& config, int rank,
                       const BackboneShare& share) {
  Elsewhere elsewhere{.experts = {}, .backbone = false, .share = share};
  elsewhere.experts.resize(config.n_all_layers());
  for (int layer = 0; layer < config.n_all_layers(); ++layer)
    for (int e = 0; config.is_moe(layer) && e < config.router.n_experts; ++e) {
      const std::vector<int>& ranks = owners.ranks(layer, e);
      const bool here = std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
      elsewhere.experts[layer].push_back(!here || !has_layer(share.layers, layer));
    }
  return elsewhere;
}

Ticket RankExperts::start(const ExpertBatch& batch) {
  ExpertBatch own = batch;
  std::vector<int32_t>& ids = ids_[ticket_of(batch.first_row)];
  own.routing.ids = owners_.ids_of(rank_, batch.layer, batch.routing.ids, ids);
  return mine_.submit(own);
}

}  // namespace tandem
