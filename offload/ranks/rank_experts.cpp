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

ExpertOwners owners_of(const std::vector<std::vector<std::vector<int>>>& ranks_of_expert,
                       const ModelConfig& config, int n_ranks, RankHosts hosts,
                       ReplicaChoice choice) {
  if (ranks_of_expert.empty()) return even_owners(config, n_ranks);
  ExpertOwners owners(config.n_all_layers(), config.router.n_experts, hosts, choice);
  for (int layer = 0; layer < std::ssize(ranks_of_expert); ++layer)
    for (int e = 0; e < std::ssize(ranks_of_expert[layer]); ++e)
      for (const int rank : ranks_of_expert[layer][e]) owners.add(layer, e, rank);
  return owners;
}

Elsewhere elsewhere_of(const ExpertOwners& owners, const ModelConfig& config, int rank,
                       const BackboneShare& share) {
  Elsewhere elsewhere{.experts = {}, .backbone = false, .share = share};
  elsewhere.experts.resize(config.n_all_layers());
  for (int layer = 0; layer < config.n_all_layers(); ++layer)
    for (int e = 0; config.is_moe(layer) && e < config.router.n_experts; ++e) {
      const std::vector<int32_t>& ranks = owners.ranks(layer, e);
      const bool here = std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
      elsewhere.experts[layer].push_back(!here || !has_layer(share.layers, layer));
    }
  return elsewhere;
}

Ticket RankExperts::start(const ExpertBatch& batch) {
  const TensorView& all = batch.routing.ids;
  const auto n_active = static_cast<int>(all.cols);
  std::vector<int32_t>& ids = ids_[batch.micro_batch];
  ids.resize(all.rows * n_active);
  chooser_.begin(batch.layer, all);
  chooser_.own_ids(all, -1, rank_, ids.data());
  ExpertBatch own = batch;
  own.routing.ids = {ids.data(), all.rows, n_active, n_active, DType::kI32};
  return mine_.submit(own);
}

}  // namespace tandem
