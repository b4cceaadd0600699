#include "loader/weights/moving_experts.h"

#include <exception>

#include "core/check.h"
#include "offload/workers/shards.h"

namespace tandem {

MovingExperts::~MovingExperts() {
  gives_up_ = true;
  if (thread_.joinable()) thread_.join();
}

void MovingExperts::begin(const ExpertsOfLayers& experts) {
  check(progress().state == State::kIdle, "one load at a time");
  experts_ = experts;
  {
    const std::lock_guard lock(mutex_);
    progress_.state = State::kLoading;
  }
  thread_ = std::thread([this] {
    load_beside_steps();
    failure_.clear();
    try {
      load();
    } catch (const LoadGivenUp&) {
      failure_ = "it was given up";
    } catch (const std::exception& error) {
      failure_ = error.what();
    }
    const std::lock_guard lock(mutex_);
    progress_.state = State::kEnded;
  });
}

void MovingExperts::load() {
  require(has_room(experts_),
          "the spare memory has no room for {} experts: others that were to leave are used by "
          "another backbone, or stayed when one was lost: start this worker again",
          n_of_all_layers(experts_));
  spare_->load(ids_of(experts_), {n_threads_, [this](int64_t done, int64_t total, double) {
                                    if (gives_up_) throw LoadGivenUp();
                                    const std::lock_guard lock(mutex_);
                                    progress_ = {State::kLoading, done, total};
                                  }});
}

ExpertLoader::Progress MovingExperts::progress() const {
  const std::lock_guard lock(mutex_);
  return progress_;
}

void MovingExperts::finish() {
  check(progress().state == State::kEnded, "a load that has ended");
  thread_.join();
  {
    const std::lock_guard lock(mutex_);
    progress_ = {};
  }
  require(failure_.empty(), "{}", failure_);
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
