#include "loader/weights/moving_experts.h"

#include <algorithm>

#include "core/check.h"
#include "offload/workers/shards.h"

namespace tandem {

void MovingExperts::begin(const ExpertsOfLayers& experts) {
  load_.begin([this, experts](const LoadProgress& progress) {
    require(has_room(experts),
            "the spare memory has no room for {} experts: others that were to leave are used by "
            "another backbone, or stayed when one was lost: start this worker again",
            n_of_all_layers(experts));
    spare_->load(ids_of(experts), {n_threads_, progress});
  });
}

void MovingExperts::finish() {
  const std::string failure = load_.end();
  require(failure.empty(), "{}", failure);
  spare_->exchange({}, weights_);
}

bool MovingExperts::has_room(const ExpertsOfLayers& experts) const {
  return spare_->has_room(ids_of(experts));
}

void MovingExperts::drop(const ExpertsOfLayers& experts) {
  check(progress().state == State::kIdle, "no load under way");
  spare_->exchange(ids_of(experts), weights_);
}

// A dense layer has none, whatever was asked.
std::vector<ExpertId> MovingExperts::ids_of(const ExpertsOfLayers& experts) const {
  std::vector<ExpertId> ids;
  for (int layer = 0; layer < std::min<int>(c_.n_all_layers(), std::ssize(experts)); ++layer)
    for (const int expert : listed(experts[layer]))
      if (c_.is_moe(layer)) ids.push_back({layer, expert});
  return ids;
}

}  // namespace tandem
