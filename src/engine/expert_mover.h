// The routed experts of this rank as they move between ranks, or between GPU and CPU, while steps
// are computed: they are loaded beside the steps, and moved between two of them.
#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <span>

#include "offload/balance/rebalance.h"
#include "scheduling/expert_loads.h"

namespace tandem {

// What a rank tells rank 0 about a move.
struct MoveStatus {
  enum class State : int32_t {
    kIdle,     // experts are where the last move() left them
    kLoading,  // load() has begun, or keep() has not ended
    kLoaded,   // move() can be called
    kFailed,   // loading has failed; keep() is to be called
  };
  State state = State::kIdle;
  int32_t n_experts = 0;       // that this rank loads
  int64_t n_bytes = 0;         // that it has read
  double load_seconds = 0;     // from the disk
  double prepare_seconds = 0;  // to a device
  double move_seconds = 0;
  std::array<char, 232> why = {};  // of kFailed, ends with 0
};

class ExpertMover {
 public:
  virtual ~ExpertMover() = default;
  // Begins to load the experts that the changes bring to this rank, on another thread. In kIdle.
  virtual void load(std::span<const ExpertChange> changes) = 0;
  // Waits for nothing.
  virtual MoveStatus status() const = 0;
  // Between two steps, after kLoaded: the changes hold, unless the state is kFailed afterwards. All
  // ranks call it between the same steps.
  virtual void move() = 0;
  // Between two steps: what load() has begun or done is given up. Does not wait for it.
  virtual void keep() = 0;
  // Between two steps, while nothing moves: where the experts are, if that is not known yet, or has
  // changed without a move; null otherwise. What is planned next refers to it.
  virtual std::shared_ptr<const ExpertHomes> new_homes() { return nullptr; }
};

}  // namespace tandem
