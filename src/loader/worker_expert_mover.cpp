#include "loader/worker_expert_mover.h"

#include <algorithm>
#include <cstring>

#include "core/check.h"

namespace tandem {
namespace {

using State = MoveStatus::State;

MoveStatus failed(MoveStatus status, const std::string& why) {
  status.state = State::kFailed;
  std::strncpy(status.why.data(), why.c_str(), status.why.size() - 1);
  return status;
}

}  // namespace

void WorkerExpertMover::load(std::span<const ExpertChange> changes) {
  check(phase_ != Phase::kLoading, "one move at a time");
  int64_t n = 0;
  for (const ExpertChange& change : changes)
    for (const int32_t worker : change.ranks) {
      const std::vector<int>& now = homes_.homes.ranks[change.layer][change.expert];
      n += std::find(now.begin(), now.end(), worker) == now.end();
    }
  phase_ = Phase::kLoading;
  status_ = {.state = State::kLoading, .n_experts = static_cast<int32_t>(n)};
  begun_ = Clock::now();
  pool_.begin_move(homes_, changes);
}

MoveStatus WorkerExpertMover::status() const {
  if (phase_ == Phase::kIdle || phase_ == Phase::kFailed) return status_;
  const WorkerMoveState now = pool_.move_state();
  MoveStatus status = status_;
  if (phase_ == Phase::kGivenUp) return {.state = now.is_loading ? State::kLoading : State::kIdle};
  if (!now.why.empty()) return failed(status, now.why);
  if (now.is_loading) return status;
  status.state = State::kLoaded;
  status.n_bytes = now.n_bytes;
  status.load_seconds = seconds_since(begun_);
  return status;
}

void WorkerExpertMover::move() {
  const auto start = Clock::now();
  const std::string why = pool_.finish_move();
  if (!why.empty()) {
    phase_ = Phase::kFailed;
    status_ = failed(status_, why);
    return;
  }
  phase_ = Phase::kIdle;
  status_ = {.move_seconds = seconds_since(start)};
}

void WorkerExpertMover::keep() {
  pool_.give_up_move();
  phase_ = Phase::kGivenUp;
}

std::shared_ptr<const ExpertHomes> WorkerExpertMover::new_homes() {
  const std::vector<int64_t> version = pool_.version_of_homes();
  if (version == version_) return nullptr;
  version_ = version;
  homes_ = pool_.homes();
  keep_on_gpu(backbone_.on_gpu, homes_.homes);
  if (!backbone_.is_whole) homes_.homes.on_gpu.clear();  // other ranks have GPUs too
  return std::make_shared<const ExpertHomes>(homes_.homes);
}

}  // namespace tandem
