#include "loader/grid_groups.h"

namespace tandem {

GridGroups::GridGroups(Group& all, BackboneGrid grid, SharedByReplicas shared) : all_(&all) {
  const int rank = all.rank(), stage = grid.stage_of(rank);
  if (grid.n_stages > 1) stage_ = all.split(stage);
  if (grid.tp < all.size()) replica_ = all.split(stage * grid.n_replicas + grid.replica_of(rank));
  if (shared.any()) like_ranks_ = all.split(stage * grid.tp + grid.part_of(rank));
  for (int first = 0; first + 1 < grid.n_stages; ++first) {
    const bool joins = stage == first || stage == first + 1;
    std::unique_ptr<Group> pair = all.split(joins ? grid.in_stage(rank) : -1);
    if (stage == first) after_ = std::move(pair);
    if (stage == first + 1) before_ = std::move(pair);
  }
}

void GridGroups::set_patience(Patience patience) {
  for (Group* const part :
       {stage_.get(), replica_.get(), before_.get(), after_.get(), like_ranks_.get()})
    if (part) part->set_patience(patience);
}

}  // namespace tandem
