#include "loader/weights/background_load.h"

#include <exception>
#include <utility>

#include "core/check.h"
#include "loader/weights/load_weights.h"

namespace tandem {

BackgroundLoad::~BackgroundLoad() {
  gives_up_ = true;
  if (thread_.joinable()) thread_.join();
}

void BackgroundLoad::begin(std::function<void(const LoadProgress&)> load) {
  check(progress().state == ExpertLoader::State::kIdle, "one load at a time");
  {
    const std::lock_guard lock(mutex_);
    progress_.state = ExpertLoader::State::kLoading;
  }
  thread_ = std::thread([this, load = std::move(load)] {
    load_beside_steps();
    failure_.clear();
    try {
      load([this](int64_t done, int64_t total, double) {
        if (gives_up_) throw LoadGivenUp();
        const std::lock_guard lock(mutex_);
        progress_ = {ExpertLoader::State::kLoading, done, total};
      });
    } catch (const LoadGivenUp&) {
      failure_ = "it was given up";
    } catch (const std::exception& error) {
      failure_ = error.what();
    }
    const std::lock_guard lock(mutex_);
    progress_.state = ExpertLoader::State::kEnded;
  });
}

ExpertLoader::Progress BackgroundLoad::progress() const {
  const std::lock_guard lock(mutex_);
  return progress_;
}

std::string BackgroundLoad::end() {
  check(progress().state == ExpertLoader::State::kEnded, "a load that has ended");
  thread_.join();
  const std::lock_guard lock(mutex_);
  progress_ = {};
  return failure_;
}

}  // namespace tandem
