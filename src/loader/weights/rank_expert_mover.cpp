#include "loader/weights/rank_expert_mover.h"

#include <algorithm>

namespace tandem {

int RankExpertMover::begin(std::span<const ExpertChange> changes) {
  changes_.assign(changes.begin(), changes.end());
  moves_ = moves_of(changes, p_.layers, p_.rank, [this](ExpertId id) {
    const std::vector<int32_t>& ranks = p_.owners.ranks(id.layer, id.expert);
    return std::find(ranks.begin(), ranks.end(), p_.rank) != ranks.end();
  });
  return static_cast<int>(moves_.arriving.size());
}

void RankExpertMover::exchange() {
  spare_->exchange(moves_.leaving, p_.weights);
  p_.owners.apply(changes_);
}

}  // namespace tandem
