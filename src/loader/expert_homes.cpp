#include "loader/expert_homes.h"

#include <algorithm>
#include <numeric>

#include "offload/ranks/rank_experts.h"

namespace tandem {
namespace {

int stage_of_layer(const ExecutedParts& parts, int layer) {
  for (int stage = 0; stage < std::ssize(parts.stages); ++stage)
    if (has_layer(parts.stages[stage], layer)) return stage;
  return 0;
}

}  // namespace

ExpertHomes expert_homes(const ModelConfig& config, const ExecutedParts& parts) {
  const int n_layers = config.n_all_layers(), n_of_stage = parts.grid.n_of_stage();
  const bool is_sliced = parts.gpu && parts.gpu->expert_columns;  // every rank has a part of each
  const ExpertOwners owners = owners_of(parts.ranks_of_expert, config, n_of_stage);
  ExpertHomes homes{.n_ranks = parts.grid.n_ranks(),
                    .n_groups = std::max(config.router.n_groups, 1)};
  homes.ranks.resize(n_layers);
  for (int layer = 0; layer < n_layers; ++layer) {
    const int first_rank = stage_of_layer(parts, layer) * n_of_stage;
    homes.ranks_of_layer.push_back({first_rank, n_of_stage});
    for (int e = 0; config.is_moe(layer) && e < config.router.n_experts; ++e) {
      std::vector<int> ranks = owners.ranks(layer, e);
      if (is_sliced) {
        ranks.resize(n_of_stage);
        std::iota(ranks.begin(), ranks.end(), 0);
      }
      for (int& rank : ranks) rank += first_rank;
      homes.ranks[layer].push_back(std::move(ranks));
    }
  }
  if (parts.gpu && homes.n_ranks == 1) homes.on_gpu = parts.gpu->experts;
  return homes;
}

}  // namespace tandem
