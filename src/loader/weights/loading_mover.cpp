#include "loader/weights/loading_mover.h"

#include <algorithm>
#include <cstring>

#include "core/check.h"
#include "core/clock.h"

namespace tandem {
namespace {

using State = MoveStatus::State;

}  // namespace

ExpertMoves moves_of(std::span<const ExpertChange> changes, StageLayers layers, int owner,
                     const std::function<bool(ExpertId)>& is_here) {
  ExpertMoves moves;
  for (const auto& [layer, expert, owners] : changes) {
    if (!has_layer(layers, layer)) continue;
    const ExpertId id = {layer, expert};
    const bool will_be = std::find(owners.begin(), owners.end(), owner) != owners.end();
    if (will_be && !is_here(id)) moves.arriving.push_back(id);
    if (!will_be && is_here(id)) moves.leaving.push_back(id);
  }
  return moves;
}

LoadingMover::LoadingMover(std::unique_ptr<OutputThread> thread) : thread_(std::move(thread)) {
  thread_->push([] { load_beside_steps(); });
}

void LoadingMover::stop() {
  given_up_ = true;
  thread_->finish();
}

void LoadingMover::load(std::span<const ExpertChange> changes) {
  check(status().state == State::kIdle, "one move at a time");
  const int n = begin(changes);
  given_up_ = false;
  {
    const std::lock_guard lock(mutex_);
    status_ = {.state = State::kLoading, .n_experts = n};
  }
  thread_->push([this] { run(); });
}

void LoadingMover::run() {
  const auto start = Clock::now();
  MoveStatus result = status();
  result.state = State::kLoaded;
  try {
    load_experts(
        [this](int64_t, int64_t, double) {
          if (given_up_) throw LoadGivenUp();
        },
        result);
  } catch (const LoadGivenUp&) {
    result.state = State::kIdle;
  } catch (const std::exception& error) {
    result.state = State::kFailed;
    std::strncpy(result.why.data(), error.what(), result.why.size() - 1);
  }
  result.load_seconds = seconds_since(start) - result.prepare_seconds;
  const std::lock_guard lock(mutex_);
  if (given_up_ && result.state == State::kLoaded) drop();
  status_ = given_up_ ? MoveStatus() : result;
}

MoveStatus LoadingMover::status() const {
  const std::lock_guard lock(mutex_);
  return status_;
}

void LoadingMover::move() {
  const auto start = Clock::now();
  check(status().state == State::kLoaded, "experts are moved once they are loaded");
  exchange();
  const std::lock_guard lock(mutex_);
  status_.state = State::kIdle;
  status_.move_seconds = seconds_since(start);
}

void LoadingMover::keep() {
  const std::lock_guard lock(mutex_);
  if (status_.state == State::kLoaded) drop();
  if (status_.state == State::kLoading)
    given_up_ = true;  // run() sees it, and then the state is kIdle
  else
    status_ = {};
}

}  // namespace tandem
