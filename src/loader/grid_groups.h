// The groups of ranks in which the ranks of a grid compute together.
#pragma once
#include <memory>

#include "comm/group.h"
#include "model/backbone_share.h"
#include "ops/rank_calls.h"

namespace tandem {

class GridGroups {
 public:
  GridGroups() = default;
  // All ranks of `all`, which outlives the object, call it.
  GridGroups(Group& all, BackboneGrid grid, SharedByReplicas shared = {});
  Group& stage() const { return stage_ ? *stage_ : *all_; }  // the ranks of this pipeline stage
  Group& replica() const {
    return replica_ ? *replica_ : *all_;
  }  // those that divide a replica in it
  // This rank and its like of the stage before, and of the one after; null: there is none.
  Group* before() const { return before_.get(); }
  Group* after() const { return after_.get(); }
  // This rank and its like of all other replicas in the stage; null: they share nothing.
  Group* like_ranks() const { return like_ranks_.get(); }
  // Those that compute the backbone with this rank. first_routes: RankGroups.
  RankGroups of_backbone(BackboneGrid grid, bool first_routes) const {
    return {.replica = grid.tp > 1 ? &replica() : nullptr,
            .before = before(),
            .after = after(),
            .like_ranks = like_ranks(),
            .first_routes = first_routes};
  }

  // Sets the patience of all these groups except `all`.
  void set_patience(Patience patience);

 private:
  Group* all_ = nullptr;
  std::unique_ptr<Group> stage_, replica_, before_, after_;  // stage_, replica_: null if it is all_
  std::unique_ptr<Group> like_ranks_;
};

}  // namespace tandem
