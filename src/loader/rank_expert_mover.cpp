#include "loader/rank_expert_mover.h"

#include <algorithm>

namespace tandem {
namespace {

bool has(std::span<const int32_t> ranks, int rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

}  // namespace

int RankExpertMover::begin(std::span<const ExpertChange> changes) {
  changes_.assign(changes.begin(), changes.end());
  arriving_.clear();
  leaving_.clear();
  for (const ExpertChange& change : changes_) {
    if (!has_layer(p_.layers, change.layer)) continue;
    const bool is_here = has(p_.owners.ranks(change.layer, change.expert), p_.rank);
    const bool will_be = has(change.ranks, p_.rank);
    if (will_be && !is_here) arriving_.push_back({change.layer, change.expert});
    if (is_here && !will_be) leaving_.push_back({change.layer, change.expert});
  }
  return static_cast<int>(arriving_.size());
}

void RankExpertMover::exchange() {
  spare_->exchange(leaving_, p_.weights);
  for (const ExpertChange& change : changes_)
    p_.owners.set(change.layer, change.expert, change.ranks);
}

}  // namespace tandem
